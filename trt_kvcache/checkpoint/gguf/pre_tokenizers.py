r"""Pre-tokenizers of byte-level BPE by their names in ``tokenizer.ggml.pre``.

A name stands for the tokenizer of one published model. llama.cpp approximates it with its own regular expressions; the ones here are from
the published ``tokenizer.json``, so that the token ids equal those of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = r"\p{N}"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, *, letters: str = r"\p{L}", more: str = r"[\r\n]*") -> str:
    """Return a pattern in the style of cl100k: words with the character before them, runs of digits, of symbols, and of spaces."""
    others = rf" ?[^\s{letters}\p{{N}}]+{more}"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters if letters == chr(92) + 'p{L}' else f'[{letters}]'}+"
    return rf"{_SUFFIX}|{word}|{digits}|{others}|{_END}"


def _cased_words(digits: str, suffix: str = "") -> str:
    """Return a pattern in the style of o200k, which also splits words at a change from lower to upper case."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}[{upper}]*[{lower}]+{suffix}|{before}[{upper}]+[{lower}]*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = _words(r"\p{N}", letters=r"\p{L}\p{M}")
_TEKKEN = _cased_words(r"\p{N}")
_GPT4O = _cased_words(r"\p{N}{1,3}", rf"{_SUFFIX}?")


@dataclass(frozen=True)
class PreTokenizer:
    """Pre-tokenizer of one name in ``tokenizer.ggml.pre``."""

    patterns: Sequence[str]
    ignore_merges: bool = False
    add_bos: bool = False


def _named(*names: str, patterns: Sequence[str], ignore_merges: bool = False, add_bos: bool = False) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, PreTokenizer(patterns, ignore_merges, add_bos))


PRE_TOKENIZERS = {
    **_named("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", patterns=(_GPT2,)),
    **_named("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", patterns=(_DIGITS, _GPT2)),
    **_named(
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        patterns=(_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
    ),
    **_named("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", patterns=(_LLAMA3,)),
    **_named("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan", "grok-2", patterns=(_QWEN2,)),
    **_named("qwen35", patterns=(_QWEN35,)),
    **_named("tekken", patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    **_named("gpt-4o", "llama4", "kanana2", patterns=(_GPT4O,)),
}
