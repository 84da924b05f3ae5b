"""``Tokenizer``: texts to token ids and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import CheckpointError

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


def test_special_tokens_are_added_and_skipped(tmp_path: Path) -> None:
    tokenizer = opened(byte_level_folder(tmp_path))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [tokenizer.encode(BOS, add_special_tokens=False)[0], *plain]
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.decode(tokenizer.encode("the"), skip_special_tokens=False) == f"{BOS}the"


@pytest.mark.parametrize("eos", [EOS, {"content": EOS, "special": True}])
def test_end_token(tmp_path: Path, eos: object) -> None:
    tokenizer = opened(byte_level_folder(tmp_path, eos_token=eos, pad_token=None))
    assert tokenizer.eos_token_ids == tuple(tokenizer.encode(EOS, add_special_tokens=False))
    assert tokenizer.special_tokens == {"eos_token": EOS}


def test_no_end_token(tmp_path: Path) -> None:
    assert opened(byte_level_folder(tmp_path)).eos_token_ids == ()
    assert opened(byte_level_folder(tmp_path, eos_token="<nowhere>")).eos_token_ids == ()


def test_damaged_files(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, eos_token=EOS)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected JSON"):
        Tokenizer.open(folder)
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:100])
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer, got an error: .* The file may be truncated"):
        Tokenizer.open(folder)
