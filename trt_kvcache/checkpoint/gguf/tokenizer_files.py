"""The tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from trt_kvcache.errors import CheckpointError

_KEY = "tokenizer.ggml."

#: Token types of ``tokenizer.ggml.token_type``.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

#: The space in pieces of SentencePiece.
_SPACE = "\u2581"

#: Lines of a text, and the ends between them.
_LINES = r"[^\n]+|\n+"

_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

#: End-of-generation tokens whatever the metadata says: files of older converters name one of several.
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_role|>",
)


#: Limit of a piece's length, far above real ones: splitting a piece takes quadratic time.
_LONGEST_PIECE = 1024

#: Phi-3: its special tokens strip the spaces after them, except for these.
_PHI3, _KEEP_SPACES = "phi3", ("<unk>", "<s>", "<|endoftext|>")


def has_tokenizer(metadata: Metadata) -> bool:
    """Return True if a file has a tokenizer; some have sizes and weights alone."""
    return f"{_KEY}model" in metadata and metadata.text(f"{_KEY}model") not in ("none", "no_vocab")


def end_token_ids(metadata: Metadata) -> list[int]:
    """Return the end-of-generation tokens: of a text first, then of a turn and of a message."""
    if not has_tokenizer(metadata):
        return []
    named = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    texts = {text: index for index, text in enumerate(metadata.texts(f"{_KEY}tokens")) if text in _ENDS}
    found = [*(token for token in named if token is not None), *(texts[text] for text in _ENDS if text in texts)]
    return list(dict.fromkeys(found))


def token_id(metadata: Metadata, name: str) -> int | None:
    """Return the id of a special token such as ``"bos"``; None if there is none in the vocabulary."""
    key = f"{_KEY}{name}_token_id"
    if key not in metadata:
        return None
    value = metadata.integer(key)
    return value if value < metadata.count_of_texts(f"{_KEY}tokens") else None


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return ``tokenizer_config.json``: the special tokens by name, and the chat templates."""
    tokens = metadata.texts(f"{_KEY}tokens")
    ids = {name: token_id(metadata, key) for name, key in _SPECIAL_TOKENS.items()}
    config: dict[str, Any] = {name: tokens[index] for name, index in ids.items() if index is not None}
    template = "tokenizer.chat_template"
    named = [key for key in metadata.header.fields if key.startswith(f"{template}.")]
    if named:
        templates = {key.removeprefix(f"{template}."): metadata.text(key) for key in named}
        templates |= {"default": metadata.text(template)} if template in metadata else {}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif template in metadata:
        config["chat_template"] = metadata.text(template)
    return config


def tokenizer_json(metadata: Metadata) -> str:
    """Return ``tokenizer.json``."""
    key = f"{_KEY}model"
    kind = metadata.text(key)
    if kind not in _KINDS:
        raise metadata.refusal(key, f"one of {', '.join(_KINDS)}")
    tokens = metadata.texts(f"{_KEY}tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        first = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise CheckpointError(f"{metadata.header.path}: {_KEY}tokens: expected tokens that differ, got {first!r} twice.")
    types = metadata.integers(f"{_KEY}token_type", len(tokens), 1)
    parts = _KINDS[kind](metadata, vocab, types)
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, **parts}, ensure_ascii=False)


def _byte_level(metadata: Metadata, vocab: Mapping[str, int], types: list[int]) -> dict[str, Any]:
    key = f"{_KEY}pre"
    name = metadata.text(key, "") or None
    if name not in PRE_TOKENIZERS:
        raise metadata.refusal(key, f"the name of a pre-tokenizer that is known ({', '.join(PRE_TOKENIZERS)})")
    pre = PRE_TOKENIZERS[name]
    splits = [_split(pattern) for pattern in pre.patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "added_tokens": _added(vocab, types),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _post_processor(metadata, add_bos=pre.add_bos),
        "decoder": byte_level,
        "model": _bpe(vocab, _given_merges(metadata, vocab), ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(metadata: Metadata, vocab: Mapping[str, int], types: list[int]) -> dict[str, Any]:
    found = _pieces(
        metadata, vocab, types, _merges_of_scores(metadata, vocab, types), prefix=metadata.flag(f"{_KEY}add_space_prefix", True)
    )
    added = [{**token, "rstrip": metadata.architecture == _PHI3 and _takes_spaces(token)} for token in _added(vocab, types)]
    return {**found, "added_tokens": added}


def _pieces_by_merges(metadata: Metadata, vocab: Mapping[str, int], types: list[int]) -> dict[str, Any]:
    """Return the tokenizer of Gemma 4: pieces as in SentencePiece, with merges, which do not cross the end of a line."""
    return {
        **_pieces(metadata, vocab, types, _given_merges(metadata, vocab), prefix=metadata.flag(f"{_KEY}add_space_prefix", False)),
        "pre_tokenizer": _split(_LINES),
    }


def _pieces(
    metadata: Metadata, vocab: Mapping[str, int], types: list[int], merges: list[tuple[str, str]], *, prefix: bool
) -> dict[str, Any]:
    """Return a tokenizer of pieces in which a space is a character, and bytes stand for characters without a piece."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((text for text, index in vocab.items() if types[index] == _UNKNOWN), None)
    return {
        "added_tokens": _added(vocab, types),
        "normalizer": {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), replace]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(vocab, merges, unknown=unknown, byte_fallback=True),
    }


#: Builders of tokenizers by ``tokenizer.ggml.model``.
_KINDS: Mapping[str, Callable[[Metadata, Mapping[str, int], list[int]], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _pieces_by_merges,
}


def _bpe(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added(vocab: Mapping[str, int], types: list[int]) -> list[dict[str, Any]]:
    """Return the added tokens, matched before the text is split: special and user-defined ones."""
    wanted = {_UNKNOWN, _CONTROL, _USER_DEFINED}
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": text, **shape, "special": types[index] != _USER_DEFINED}
        for text, index in vocab.items()
        if types[index] in wanted and text
    ]


def _takes_spaces(token: Mapping[str, Any]) -> bool:
    """Return True if a special token of Phi-3 strips the spaces after it, which no field says."""
    return bool(token["special"]) and token["content"] not in _KEEP_SPACES


def _post_processor(metadata: Metadata, *, add_bos: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens to a text, or None."""
    tokens = metadata.texts(f"{_KEY}tokens")
    wanted = {
        "bos": metadata.flag(f"{_KEY}add_bos_token", add_bos),
        "eos": metadata.flag(f"{_KEY}add_eos_token", False),
    }
    ids = {name: token_id(metadata, name) for name, is_wanted in wanted.items() if is_wanted}
    found = {name: index for name, index in ids.items() if index is not None}
    if not found:
        return None
    special = {name: {"SpecialToken": {"id": tokens[index], "type_id": 0}} for name, index in found.items()}

    def around(*sequences: str) -> list[dict[str, Any]]:
        middle = [{"Sequence": {"id": one, "type_id": 0}} for one in sequences]
        return [*(special[name] for name in ("bos",) if name in special), *middle, *(special[name] for name in ("eos",) if name in special)]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in found.values()},
    }


def _given_merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    key = f"{_KEY}merges"
    merges = []
    for text in metadata.texts(key):
        left, _, right = text[1:].partition(" ")  # the first character may be a space in vocabularies that do not write bytes
        pair = (text[:1] + left, right)
        if pair[0] not in vocab or right not in vocab or text[:1] + left + right not in vocab:
            raise CheckpointError(f"{metadata.header.path}: {key}: expected two tokens that make a third one, got {text[:100]!r}.")
        merges.append(pair)
    return merges


def _merges_of_scores(metadata: Metadata, vocab: Mapping[str, int], types: list[int]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: all pairs of pieces that form a piece, by its score, the best first."""
    key = f"{_KEY}scores"
    scores = metadata.numbers(key)
    if len(scores) != len(vocab):
        raise metadata.refusal(key, f"{len(vocab)} numbers, one for each token")
    longest = max(map(len, vocab), default=0)
    if longest > _LONGEST_PIECE:
        raise CheckpointError(
            f"{metadata.header.path}: {_KEY}tokens: expected pieces of at most {_LONGEST_PIECE} characters, got one of {longest}."
        )
    left_out = {_UNKNOWN, _CONTROL, _BYTE}
    pieces = {text: index for text, index in vocab.items() if types[index] not in left_out}
    found = []
    for text, index in pieces.items():
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [(left, right) for left, right in pairs if left in pieces and right in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        found += [((scores[index], len(left), len(right)), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in found]
