"""Two small tokenizers of the kinds that models have, whose tokens split characters into bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, processors

from trt_kvcache.checkpoint import Tokenizer

BOS, EOS = "<s>", "</s>"


def byte_level_folder(folder: Path, **config: Any) -> Path:
    """Byte-level BPE, as Llama 3 and Qwen have it: one token per byte, and one for the word ``the`` with its space."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe"]
    tokenizer = Backend(models.BPE(vocab=_vocab(pieces), merges=[("t", "h"), ("th", "e"), ("Ġ", "the")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _write(folder, tokenizer, config)


def byte_fallback_folder(folder: Path, **config: Any) -> Path:
    """SentencePiece-style BPE, as Llama 2 has it: a few letters, and bytes for all that is no letter of it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "a", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Backend(models.BPE(vocab=_vocab(pieces), merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _write(folder, tokenizer, config)


def opened(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


def _vocab(pieces: list[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(pieces)}


def _write(folder: Path, tokenizer: Backend, config: dict[str, Any]) -> Path:
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
