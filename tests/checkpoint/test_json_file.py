"""JSON files of a model folder, and errors that name the file."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    ],
    ids=["missing", "truncated", "no object", "no UTF-8"],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "a.json")


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
