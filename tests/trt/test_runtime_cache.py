"""The file that keeps what TensorRT for RTX compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trt_kvcache.trt.runtime_cache import RuntimeCacheFile

KEY = ("sha of the plan", "GPU", "uuid", "8.9", "13000", "tensorrt_rtx", "1.7.1")


def test_written_and_read_back(tmp_path: Path) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path / "made" / "here")
    assert file.read() is None
    file.write(b"kernels")
    assert file.read() == b"kernels"
    file.write(b"more kernels")
    assert RuntimeCacheFile(KEY, folder=tmp_path / "made" / "here").read() == b"more kernels"
    assert os.listdir(file.path.parent) == [file.path.name]


def test_every_part_of_the_key_makes_another_file(tmp_path: Path) -> None:
    paths = {RuntimeCacheFile(KEY, folder=tmp_path).path}
    for index in range(len(KEY)):
        paths.add(RuntimeCacheFile((*KEY[:index], KEY[index] + "x", *KEY[index + 1 :]), folder=tmp_path).path)
    paths.add(RuntimeCacheFile(("sha of the planGPU", "", *KEY[2:]), folder=tmp_path).path)
    assert len(paths) == len(KEY) + 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_damaged_file_is_ignored_with_a_warning(tmp_path: Path, damage: str) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    file.write(b"kernels")
    content = bytearray(file.path.read_bytes())
    content[-1] ^= 1
    file.path.write_bytes({"flipped": bytes(content), "truncated": bytes(content[:40]), "empty": b""}[damage])
    with pytest.warns(RuntimeWarning, match=r"TensorRT-RTX runtime cache .*\.rtxcache: it is damaged; kernels are compiled again"):
        assert file.read() is None


def test_place_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    file = RuntimeCacheFile(KEY, folder=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="it cannot be written"):
        file.write(b"kernels")
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert file.read() is None


def test_failure_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    file.write(b"old")

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        file.write(b"new")
    assert file.read() == b"old"
    assert os.listdir(tmp_path) == [file.path.name]
