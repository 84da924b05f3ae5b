"""``Tokenizer``: texts to token ids and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers

from tests.helpers.assertions import raises
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import CheckpointError, ConfigError, RangeError

from .tokenizer_folders import BOS, EOS, byte_fallback_folder, byte_level_folder, opened


def test_a_folder_without_tokenizer_json_has_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_round_trip(tmp_path: Path, make: object) -> None:
    tokenizer = opened(make(tmp_path))  # type: ignore[operator]
    text = "the tea: 漢字 👩‍🚀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
def test_the_bytes_of_tokens_together_are_those_of_the_text(tmp_path: Path, make: object) -> None:
    tokenizer = opened(make(tmp_path))  # type: ignore[operator]
    text = "the\x00 the tea: 漢字 👩‍🚀\n\xad"
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert b"".join(piece or b"?" for piece in pieces).decode().removeprefix(" ") == text
    assert {b" the", "漢".encode()[:1]} <= set(pieces)
    assert tokenizer.token_bytes(tokenizer.encode("")[0]) == BOS.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None


def test_the_bytes_of_tokens_of_another_kind_are_not_known(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text()) | {"decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert opened(folder).token_bytes(0) is None


def test_special_tokens_are_added_and_skipped(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [tokenizer.encode(BOS, add_special_tokens=False)[0], *plain]
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False) == f"{BOS}the"


def test_special_tokens_are_known_by_their_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(byte_level_folder(tmp_path))
    assert tokenizer is not None
    assert [tokenizer.special_token_id(BOS)] == tokenizer.encode(BOS, add_special_tokens=False)
    assert tokenizer.special_token_id("the") is None
    assert tokenizer.special_token_id(f"{BOS}the") is None


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 2}
PADDING = {"strategy": {"Fixed": 10_000_000}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "t"}


@pytest.mark.parametrize(
    "left_from_training",
    [
        {"truncation": TRUNCATION},
        {"truncation": TRUNCATION | {"direction": "Left", "max_length": 0, "stride": 9}},
        {"padding": PADDING},
        {"padding": PADDING | {"strategy": "BatchLongest", "direction": "Right"}, "truncation": TRUNCATION},
    ],
)
def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path, left_from_training: dict[str, object]) -> None:
    tokenizer, text = opened(byte_level_folder(tmp_path / "plain")), "the tea and the 漢字 of the sea"
    folder = byte_level_folder(tmp_path / "trained")
    data = json.loads((folder / "tokenizer.json").read_text()) | left_from_training
    (folder / "tokenizer.json").write_text(json.dumps(data))
    trained = opened(folder)
    for special in (True, False):
        assert trained.encode(text, add_special_tokens=special) == tokenizer.encode(text, add_special_tokens=special)
    assert json.loads(trained.to_json()) == json.loads(tokenizer.to_json())


@pytest.mark.parametrize("eos", [EOS, {"content": EOS, "special": True}])
def test_end_token(tmp_path: Path, eos: object) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, eos_token=eos, pad_token=None))
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode(EOS, add_special_tokens=False))
    assert tokenizer.special_tokens == {"eos_token": EOS}


def test_no_end_token(tmp_path: Path) -> None:
    assert opened(byte_level_folder(tmp_path)).eos_token_ids == ()
    assert opened(byte_level_folder(tmp_path, eos_token="<nowhere>")).eos_token_ids == ()


@pytest.mark.parametrize("adds", [False, True], ids=["tokenizer.json does not", "tokenizer.json does"])
@pytest.mark.parametrize(("wanted", "begins"), [(True, True), (False, False), (None, None), (..., None)])
def test_add_bos_token_decides_how_a_text_begins(tmp_path: Path, adds: bool, wanted: object, begins: bool | None) -> None:
    config = {"bos_token": BOS} | ({} if wanted is ... else {"add_bos_token": wanted})
    folder = byte_level_folder(tmp_path, **config)
    if not adds:
        data = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
        (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = opened(folder)
    bos, plain = tokenizer.encode(BOS, add_special_tokens=False), tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == (bos if (adds if begins is None else begins) else []) + plain
    assert tokenizer.encode("") == (bos if (adds if begins is None else begins) else [])


def test_a_begin_token_that_the_text_itself_has_is_kept(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, bos_token=BOS, add_bos_token=False)
    data = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = opened(folder)
    assert tokenizer.encode(f"{BOS}the") == tokenizer.encode(f"{BOS}the", add_special_tokens=False)


def test_add_bos_token_without_a_begin_token_does_nothing(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, add_bos_token=False))
    assert tokenizer.encode("the") == tokenizer.encode(f"{BOS}the", add_special_tokens=False)


def test_an_add_bos_token_that_is_no_flag_is_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, "tokenizer_config.json: add_bos_token", expected="true or false", got="'yes'"):
        Tokenizer.open(byte_level_folder(tmp_path, add_bos_token="yes"))


def test_text_with_lone_surrogates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected characters that UTF-8 can encode, got lone surrogates"):
        opened(byte_level_folder(tmp_path)).encode("a\ud800")


@pytest.mark.parametrize("token", [-1, 2**32, 10**30])
def test_an_id_that_is_no_id_is_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(RangeError, match="expected token ids from 0"):
        opened(byte_level_folder(tmp_path)).decode([token])


class PanicException(BaseException):
    """What a panic of the library raises: no ``Exception``."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), Exception("regex"), ValueError("merges"), RecursionError()])
def test_whatever_the_library_raises_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    folder = byte_level_folder(tmp_path)
    tokenizer = opened(folder)
    monkeypatch.setattr(tokenizer, "_backend", SimpleNamespace(encode=fail, decode=fail))
    text = f"tokenizer.json: the tokenizer fails: {type(error).__name__}: {error}."
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tokenizer.encode("the")
    with pytest.raises(CheckpointError, match=re.escape(text)):
        tokenizer.decode([1])
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_str=fail))
    with raises(CheckpointError, "tokenizer.json", expected="tokenizer", got="error"):
        Tokenizer.open(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_error_of_the_library_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    tokenizer = opened(byte_level_folder(tmp_path))
    monkeypatch.setattr(tokenizer, "_backend", SimpleNamespace(encode=fail, decode=fail))
    with pytest.raises(error):
        tokenizer.encode("the")
    with pytest.raises(error):
        tokenizer.decode([1])


def test_damaged_files(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token=EOS)
    (folder / "tokenizer_config.json").write_text("{")
    with raises(CheckpointError, "tokenizer_config.json", "JSON"):
        Tokenizer.open(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:100])
    (folder / "tokenizer_config.json").unlink()
    with raises(CheckpointError, "tokenizer.json", expected="tokenizer", got="error", says="The file may be truncated"):
        Tokenizer.open(folder)
