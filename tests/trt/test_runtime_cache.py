"""The file that keeps what TensorRT for RTX compiled."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from trt_kvcache._util.file_lock import file_lock
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.trt.runtime_cache import MAX_FILES, RuntimeCache, RuntimeCacheFile

KEY = ("sha of the plan", "GPU", "uuid", "8.9", "13000", "tensorrt_rtx", "1.7.1")


def test_written_and_read_back(tmp_path: Path) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path / "made" / "here")
    assert file.read() is None
    file.write(b"kernels", read=None)
    assert file.read() == b"kernels"
    file.write(b"more kernels", read=b"kernels")
    assert RuntimeCacheFile(KEY, folder=tmp_path / "made" / "here").read() == b"more kernels"
    assert {path.name for path in file.path.parent.iterdir()} == {file.path.name, "rtxcache.lock"}


def test_every_part_of_the_key_makes_another_file(tmp_path: Path) -> None:
    paths = {RuntimeCacheFile(KEY, folder=tmp_path).path}
    for index in range(len(KEY)):
        paths.add(RuntimeCacheFile((*KEY[:index], KEY[index] + "x", *KEY[index + 1 :]), folder=tmp_path).path)
    paths.add(RuntimeCacheFile(("sha of the planGPU", "", *KEY[2:]), folder=tmp_path).path)
    assert len(paths) == len(KEY) + 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty"])
def test_damaged_file_is_ignored_with_a_warning(tmp_path: Path, damage: str) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    file.write(b"kernels", read=None)
    content = bytearray(file.path.read_bytes())
    content[-1] ^= 1
    file.path.write_bytes({"flipped": bytes(content), "truncated": bytes(content[:40]), "empty": b""}[damage])
    with pytest.warns(RuntimeWarning, match=r"TensorRT-RTX runtime cache .*\.rtxcache: it is damaged; kernels are compiled again"):
        assert file.read() is None


def test_place_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    file = RuntimeCacheFile(KEY, folder=tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="it cannot be written"):
        file.write(b"kernels", read=None)
    with pytest.warns(RuntimeWarning, match="it cannot be read"):
        assert file.read() is None


def test_failure_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    file.write(b"old", read=None)

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        file.write(b"new", read=None)
    assert file.read() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {file.path.name, "rtxcache.lock"}


def test_what_another_process_compiled_meanwhile_stays_if_it_is_more(tmp_path: Path) -> None:
    file, other = (RuntimeCacheFile(KEY, folder=tmp_path) for _ in range(2))
    other.write(b"many kernels", read=None)
    file.write(b"few", read=None)
    assert file.read() == b"many kernels"
    file.write(b"even more kernels", read=None)
    assert file.read() == b"even more kernels"
    file.write(b"less", read=b"even more kernels")
    assert file.read() == b"less"


def test_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    files = [RuntimeCacheFile((str(number),), folder=tmp_path) for number in range(MAX_FILES + 2)]
    for number, file in enumerate(files[:-1]):
        file.write(b"kernels", read=None)
        os.utime(file.path, (number, number))
    assert files[1].read() == b"kernels"  # used again
    files[-1].write(b"kernels", read=None)
    assert [number for number, file in enumerate(files) if not file.path.exists()] == [0, 2]


def test_a_writer_waits_for_another_process(tmp_path: Path) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    with file_lock(tmp_path / "rtxcache.lock"):
        writer = threading.Thread(target=file.write, args=(b"kernels",), kwargs={"read": None})
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert not file.path.exists()
    writer.join()
    assert file.read() == b"kernels"


class Compiled:
    """An ``IRuntimeCache`` that notes the threads that serialise it."""

    def __init__(self) -> None:
        self.content, self.threads = b"kernels", list[int]()

    def deserialize(self, blob: bytes) -> bool:
        return blob == self.content

    def serialize(self) -> bytes:
        self.threads.append(threading.get_ident())
        return self.content


@pytest.fixture
def compiled() -> Compiled:
    return Compiled()


@pytest.fixture
def cache(tmp_path: Path, compiled: Compiled) -> RuntimeCache:
    cache = RuntimeCache(RuntimeCacheFile(KEY, folder=tmp_path), HostMemory())
    assert cache.open(lambda: compiled) is compiled
    return cache


def test_saving_waits_for_no_file_and_closing_does(tmp_path: Path, cache: RuntimeCache, compiled: Compiled) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    with file_lock(tmp_path / "rtxcache.lock"):  # as another process that writes
        cache.save()
        assert file.read() is None
    cache.close()
    assert file.read() == b"kernels"
    assert compiled.threads == [threading.get_ident()] * 2  # never by the thread that writes


def test_what_is_compiled_while_a_file_is_written_is_written_after_it(tmp_path: Path, cache: RuntimeCache, compiled: Compiled) -> None:
    with file_lock(tmp_path / "rtxcache.lock"):
        cache.save()
        compiled.content = b"more kernels"
    cache.save()
    cache.close()
    assert RuntimeCacheFile(KEY, folder=tmp_path).read() == b"more kernels"


def test_a_cache_that_did_not_grow_is_not_written_again(tmp_path: Path, compiled: Compiled) -> None:
    file = RuntimeCacheFile(KEY, folder=tmp_path)
    file.write(b"kernels", read=None)
    cache = RuntimeCache(file, HostMemory())
    cache.open(lambda: compiled)
    file.path.unlink()
    cache.close()
    assert not file.path.exists()


def test_a_file_that_cannot_be_written_is_a_warning_at_the_end(tmp_path: Path, cache: RuntimeCache) -> None:
    (tmp_path / "rtxcache.lock").mkdir()
    with pytest.warns(RuntimeWarning, match="it cannot be written"):
        cache.close()
