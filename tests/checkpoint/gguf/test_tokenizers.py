"""Tokenizers in the metadata of GGUF files give the ids of the tokenizers that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises

pytest.importorskip("gguf")

import gguf
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers, trainers

from trt_kvcache import Tokenizer
from trt_kvcache.checkpoint.gguf.model import GGUFModel
from trt_kvcache.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from trt_kvcache.checkpoint.gguf.tokenizer_files import end_token_ids
from trt_kvcache.errors import CheckpointError

from .tokenizers_in_metadata import TEXTS, write_tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_OF_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


#: How the published ``tokenizer.json`` of each kind cuts texts.
PUBLISHED: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": split(_LLAMA3),
    "qwen2": split(_LLAMA3.replace("{1,3}", "")),
    "qwen35": split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "tekken": split(_WORDS_OF_O200K % ("", "", r"\p{N}")),
    "gpt-4o": split(_WORDS_OF_O200K % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", r"\p{N}{1,3}")),
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(edit: Callable[[gguf.GGUFWriter], object], architecture: str = "llama") -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        edit(writer)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            step()
        return path

    return write


def byte_level(pre: pre_tokenizers.PreTokenizer) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXTS, TEXTS[0] * 3], trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def sentencepiece(*, prefix: bool) -> Backend:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=special, show_progress=False, limit_alphabet=90)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    backend.train_from_iterator(TEXTS, trainer)
    merges = _merges_of_vocabulary(backend, len(special))
    vocabulary = backend.get_vocab()
    whole = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    whole.normalizer = backend.normalizer
    whole.add_special_tokens(["<unk>", "<s>", "</s>"])
    return whole


def _merges_of_vocabulary(backend: Backend, first: int) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece: SentencePiece joins whatever makes the best piece."""
    pieces = sorted((item for item in backend.get_vocab().items() if item[1] >= first), key=lambda item: item[1])
    known = dict(pieces)
    pairs = ((piece[:cut], piece[cut:]) for piece, _ in pieces for cut in range(1, len(piece)))
    return [pair for pair in pairs if pair[0] in known and pair[1] in known]


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_bpe(written: Callable[..., Path], name: str) -> None:
    original = byte_level(PUBLISHED[name])
    original.model.ignore_merges = name in ("llama-bpe", "tekken")
    path = written(lambda writer: write_tokenizer(writer, original, kind="gpt2", pre=name, bos=0, eos=1))
    check(path, original)


def test_special_tokens_of_phi_3_take_the_spaces_behind_them(written: Callable[..., Path]) -> None:
    path = written(lambda writer: write_tokenizer(writer, sentencepiece(prefix=True), kind="llama", bos=1, eos=2), "phi3")
    tokenizer = opened(path)
    assert tokenizer.encode("</s>  the", add_special_tokens=False) == tokenizer.encode("</s>the", add_special_tokens=False)
    assert tokenizer.encode("<s>  the", add_special_tokens=False) != tokenizer.encode("<s>the", add_special_tokens=False)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(written: Callable[..., Path], prefix: bool) -> None:
    original = sentencepiece(prefix=prefix)

    def edit(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, original, kind="llama", bos=1, eos=2)
        writer.add_add_space_prefix(prefix)

    check(written(edit), original)


def test_pieces_with_merges_of_gemma_4(written: Callable[..., Path]) -> None:
    original = sentencepiece(prefix=False)
    original.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")  # the vocabulary of Gemma 4 has no piece of two lines
    original.add_tokens(["<|channel>"])

    def edit(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, original, kind="gemma4", bos=1, eos=2)
        writer.add_add_bos_token(True)

    path = written(edit, "gemma4")
    check(path, original)
    tokenizer = opened(path)
    for text in ("<|channel>a  b", " \n \n\n a"):
        assert tokenizer.encode(text) == [1, *original.encode(text, add_special_tokens=False).ids]


def test_merges_do_not_cross_the_end_of_a_line(written: Callable[..., Path]) -> None:
    """As in llama.cpp."""
    vocabulary = {"<unk>": 0, "a": 1, "\n": 2, "a\n": 3, "\n\n": 4}
    backend = Backend(models.BPE(vocabulary, [("a", "\n"), ("\n", "\n")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    path = written(lambda writer: write_tokenizer(writer, backend, kind="gemma4"), "gemma4")
    assert opened(path).encode("a\n\na", add_special_tokens=False) == [1, 4, 1]


def check(path: Path, original: Backend) -> None:
    tokenizer = opened(path)
    assert tokenizer.vocab_size == original.get_vocab_size()
    for text in (*TEXTS, "a</s>b <think> c"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text or "</s>" in text


def opened(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.open(path)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("pre", "flags", "ends"),
    [
        ("gpt-2", {}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ("llama-bpe", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
    ],
)
def test_special_tokens_around_a_text(written: Callable[..., Path], pre: str, flags: dict[str, bool], ends: Any) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, byte_level(PUBLISHED[pre]), kind="gpt2", pre=pre, bos=0, eos=1)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    tokenizer = opened(written(edit))
    inside = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*ends[0], *inside, *ends[1]]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("named", [False, True])
def test_chat_template(written: Callable[..., Path], named: bool) -> None:
    template = "{{ bos_token }}{% for one in messages %}[{{ one.role }}] {{ one.content }}{% endfor %}"
    given: Any = [{"name": "default", "template": template}, {"name": "tool_use", "template": "no"}] if named else template

    def edit(writer: gguf.GGUFWriter) -> None:
        write_tokenizer(writer, byte_level(PUBLISHED["gpt-2"]), kind="gpt2", pre="gpt-2", bos=0, eos=1)
        writer.add_chat_template(given)

    assert opened(written(edit)).apply_chat_template([{"role": "user", "content": "Hi"}]) == "<s>[user] Hi"


def test_every_end_of_an_answer_ends_it(written: Callable[..., Path]) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        backend = byte_level(PUBLISHED["qwen2"])
        backend.add_special_tokens(["<turn|>", "<|im_end|>", "<|eom|>"])
        write_tokenizer(writer, backend, kind="gpt2", pre="qwen2", bos=0, eos=1, eom=backend.token_to_id("<|eom|>"))

    path = written(edit)
    size = opened(path).vocab_size
    assert end_token_ids(GGUFModel(path).metadata) == [1, size - 1, size - 2, size - 3]


def test_a_file_without_tokenizer(written: Callable[..., Path]) -> None:
    assert Tokenizer.open(written(lambda writer: writer.add_tokenizer_model("none"))) is None


@pytest.mark.parametrize(
    ("kind", "pre", "complaint"),
    [
        ("bert", "default", "tokenizer.ggml.model: expected one of gpt2, llama, gemma4, got 'bert'"),
        ("gpt2", "qwen9", "tokenizer.ggml.pre: expected the name of a pre-tokenizer that is known (gpt-2, "),
        ("gpt2", "default", "got 'default'."),
    ],
)
def test_what_is_not_known_is_refused(written: Callable[..., Path], kind: str, pre: str, complaint: str) -> None:
    path = written(lambda writer: write_tokenizer(writer, byte_level(PUBLISHED["gpt-2"]), kind=kind, pre=pre, bos=0))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(path)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("merges", ["a b c d"], "tokenizer.ggml.merges: expected two tokens that make a third one, got 'a b c d'."),
        ("tokens", ["a", "b", "a"], "tokenizer.ggml.tokens: expected tokens that differ, got 'a' twice."),
        ("token_type", [1, 1], "tokenizer.ggml.token_type: expected an integer, or 3 of them, got 2 elements."),
    ],
)
def test_contradictions_are_refused(written: Callable[..., Path], name: str, value: list[Any], complaint: str) -> None:
    fields: dict[str, list[Any]] = {"tokens": ["a", "b", "c"], "token_type": [1, 1, 1], "merges": [], name: value}

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        for key, items in fields.items():
            writer.add_array(f"tokenizer.ggml.{key}", items or ["a b"])

    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(written(edit))
    assert complaint in str(caught.value)


def test_pieces_that_nobody_has_are_refused(written: Callable[..., Path]) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "a" * 50_000])
        writer.add_token_scores([0.0, 0.0])

    with raises(CheckpointError, "tokenizer.ggml.tokens", expected="pieces of at most 1024 characters", got=50000):
        Tokenizer.open(written(edit))


def test_names_of_pre_tokenizers_are_tested_by_kind() -> None:
    patterns = {tuple(PRE_TOKENIZERS[name].patterns) for name in PUBLISHED}
    assert {tuple(one.patterns) for one in PRE_TOKENIZERS.values()} == patterns
