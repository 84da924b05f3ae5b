"""The runtime cache of TensorRT for RTX, in the user's cache folder.

TensorRT for RTX compiles kernels at run time, for the GPU that it finds. Its runtime cache (``IRuntimeCache``) can be serialised, which
makes the next start fast. All plans of an engine share one cache, in one file. Its name is a hash of the network, the GPU, the major
version of its driver and the release of TensorRT. No such cache has been written on a GPU yet.
"""

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.file_lock import file_lock
from trt_kvcache._util.user_cache import user_cache_folder
from trt_kvcache.memory.base import Memory

#: Most files that are kept.
MAX_FILES = 32

_DIGEST_NBYTES = hashlib.sha256().digest_size


def gpu_identity(device: str) -> tuple[str, ...]:
    """Return name, UUID and compute capability of a GPU, and the major version of its driver: newer ones take kernels of older ones."""
    from cuda.bindings import driver
    from cuda.core import Device

    gpu = Device(int(device.partition(":")[2]))
    _, version = driver.cuDriverGetVersion()
    capability = gpu.compute_capability
    return (str(gpu.name), str(gpu.uuid), f"{capability.major}.{capability.minor}", str(version // 1000))


class RuntimeCacheFile:
    """A file with a serialised runtime cache, after its SHA-256. ``key`` is everything that the kernels depend on."""

    def __init__(self, key: Sequence[str], *, folder: Path | None = None) -> None:
        name = hashlib.sha256("\0".join(key).encode()).hexdigest()
        self.path = (folder or user_cache_folder()) / f"{name[:32]}.rtxcache"

    def read(self) -> bytes | None:
        """Read the cache; None, with a warning, if it is damaged or cannot be read, and None if there is no file."""
        try:
            content = self.path.read_bytes()
            os.utime(self.path)  # the least recently used files go first
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"cannot be read ({error})")
            return None
        blob = _intact(content)
        if blob is None:
            self.warn("is damaged")
        return blob

    def write(self, blob: bytes, *, read: bytes | None) -> None:
        """Write the cache, complete or not at all, and remove old files; a warning says that it cannot be written.

        A larger one that another process wrote since the file was ``read`` stays: that process compiled more.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(self.path.parent / "rtxcache.lock"):
                other = _intact(self.path.read_bytes()) if self.path.exists() else None
                if other is not None and other != read and len(other) > len(blob):
                    return
                with atomic_file(self.path) as file:
                    file.write(hashlib.sha256(blob).digest() + blob)
                newest_first = sorted(self.path.parent.glob("*.rtxcache"), key=lambda path: path.stat().st_mtime, reverse=True)
                for old in newest_first[MAX_FILES:]:
                    old.unlink()
        except OSError as error:
            self.warn(f"cannot be written ({error})")

    def warn(self, what: str) -> None:
        """Warn that the file is not used, which costs only time."""
        warnings.warn(
            f"TensorRT-RTX runtime cache {self.path}: it {what}; kernels are compiled again at each start.", RuntimeWarning, stacklevel=3
        )


def _intact(content: bytes) -> bytes | None:
    """Return a cache without its SHA-256, None if it is damaged."""
    digest, blob = content[:_DIGEST_NBYTES], content[_DIGEST_NBYTES:]
    return blob if hashlib.sha256(blob).digest() == digest else None


def network_key(facts: Mapping[str, Any]) -> str:
    """Return a key for what an engine computes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class RuntimeCache:
    """The ``IRuntimeCache`` that all plans of an engine share, and its file."""

    def __init__(self, file: RuntimeCacheFile, memory: Memory) -> None:
        self._file = file
        self._memory = memory
        self._cache: Any = None
        self._saved: bytes | None = None
        self._writer: threading.Thread | None = None

    def open(self, create: Callable[[], Any]) -> Any:
        """Return the cache; the first plan makes it, with what the file has."""
        if self._cache is None:
            cache = create()
            self._saved = self._file.read()
            if self._saved is not None and not cache.deserialize(self._saved):
                self._file.warn("was refused by TensorRT")
                self._saved = None
            self._cache = cache
        return self._cache

    def save(self) -> None:
        """Write the kernels that were compiled, unless they equal those in the file. A thread writes, so that no step waits for a disk.

        They are serialised by the caller: TensorRT promises nothing about a cache that other threads use meanwhile.
        """
        if self._cache is None:
            return
        self._wait()
        getattr(self._memory, "make_current", lambda: None)()  # host memory has no device
        content = self._cache.serialize()
        if content is None:
            self._file.warn("could not be serialised by TensorRT")
        elif (blob := bytes(content)) != self._saved:
            self._writer = threading.Thread(target=partial(self._file.write, blob, read=self._saved), name="rtxcache")
            self._writer.start()
            self._saved = blob

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def close(self) -> None:
        """Save, wait until the file is written, and release the cache. Idempotent."""
        try:
            self.save()
            self._wait()
        finally:
            self._cache = None
