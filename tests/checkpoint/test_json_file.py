"""JSON files of a model folder, and errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.checkpoint.json_file import read_json, read_json_if_present, read_text
from trt_kvcache.errors import CheckpointError


def test_text_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é漢".encode())
    assert read_text(tmp_path / "a.txt") == "é漢"


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"x": [1, null]}')
    assert read_json(tmp_path / "a.json") == {"x": [1, None]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"a\.json: expected a file, got nothing there\. A Hugging Face model folder has one\."),
        (b"{", r"a\.json: expected JSON, got a syntax error: .* The file may be truncated\."),
        (b"[1]", r"a\.json: expected a JSON object, got list\."),
        (b"\xff", r"a\.json: cannot be read: .*utf-8"),
        (b'{"a":' * 100_000, r"a\.json: expected JSON, got values nested more than 100 deep\."),
        (b'{"a":' * 101 + b"1" + b"}" * 101, r"a\.json: expected JSON, got values nested more than 100 deep\."),
        (b'{"a": ' + b"9" * 5000 + b"}", r"a\.json: expected JSON, got an integer of more than 4300 digits\."),
    ],
    ids=["missing", "truncated", "no object", "no UTF-8", "far too deep", "too deep", "too many digits"],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "a.json")


def test_values_may_be_nested_a_hundred_deep(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a":' * 100 + b"1" + b"}" * 100)
    assert read_json(tmp_path / "a.json")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 40)
    with raises(CheckpointError, "a.json: cannot be read", expected="at most 67108864 bytes", got=1099511627776):
        read_json(tmp_path / "a.json")
    with raises(CheckpointError, "a.json: cannot be read", expected="at most 268435456 bytes"):
        read_text(tmp_path / "a.json")


@pytest.mark.parametrize("read", [read_text, read_json, read_json_if_present])
def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("zero", "a device")):
        with raises(CheckpointError, f"{name}: cannot be read", expected="regular file", got=kind):
            read(tmp_path / name)


def test_a_folder_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(CheckpointError, match=r"a\.json: cannot be read: "):
        read_json(tmp_path / "a.json")


def test_an_optional_file_that_is_missing_is_an_empty_object(tmp_path: Path) -> None:
    assert read_json_if_present(tmp_path / "a.json") == {}


def test_an_optional_file_that_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match="expected JSON"):
        read_json_if_present(tmp_path / "a.json")
