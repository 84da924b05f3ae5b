"""Writes tokenizers of Hugging Face into the metadata of GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (gguf.TokenType[name] for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "BYTE"))

#: What is hard to cut into words: languages, digits, spaces, symbols, capital letters, marks, and characters of four bytes.
TEXTS = (
    "Hello world! It's 12345 o'clock, I'LL go. They've HTMLParser camelCase x=3.14;",
    "  leading and   inner spaces \n\n\tand tabs\r\n at lines  ",
    "Größe Straße naïve café Ærøskøbing — «guillemets» … İstanbul",
    "Съешь же ещё этих мягких французских булок, 2024 год.",
    "我能吞下玻璃而不伤身体。日本語のテキスト、カタカナ。한국어 문장입니다.",
    "हिन्दी में देवनागरी लिपि ที่ประเทศไทย العربية ١٢٣ עִבְרִית",
    "👩‍👩‍👧‍👦 emoji 🇩🇪 🏳️‍🌈 math ∑∫√ 𝔘𝔫𝔦 \u200b zero",  # noqa: RUF001
    "def f(x):\n    return x[::-1] // 2  # comment\n\n\n\nclass A:\n\tpass",
    "",
    " ",
    "\n",
    "e\u0301 é \ufb01 ½ ²³ Ⅷ",
)


def write_tokenizer(writer: gguf.GGUFWriter, backend: Backend, *, kind: str, pre: str = "default", **ids: int) -> None:
    """Write a tokenizer: pieces of SentencePiece with scores that are their places, those of byte-level BPE with merges."""
    data: dict[str, Any] = json.loads(backend.to_str())
    added = {token["content"]: token for token in data["added_tokens"]}
    pieces = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types([_type(piece, added, data["model"].get("unk_token")) for piece, _ in pieces])
    if kind == "llama":
        writer.add_token_scores([-float(index) for _, index in pieces])
    else:
        writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    for name, index in ids.items():
        getattr(writer, f"add_{name}_token_id")(index)


def _type(piece: str, added: dict[str, Any], unknown: str | None) -> gguf.TokenType:
    if piece == unknown:
        return UNKNOWN
    if piece in added:
        return CONTROL if added[piece]["special"] else USER_DEFINED
    return BYTE if piece.startswith("<0x") and len(piece) == 6 else NORMAL
