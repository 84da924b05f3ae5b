"""Freed memory is given back: to the system, and of files that are mapped."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trt_kvcache._util.freed_memory import return_freed_memory
from trt_kvcache._util.mapped_pages import release_pages

STATUS = Path("/proc/self/status")

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs Linux")

#: Blocks of 64 KiB, of which the last one stays, so that the heap cannot shrink from its end.
KEPT_BY_THE_C_LIBRARY = """
import ctypes
from tests._util.test_freed_memory import resident
from trt_kvcache._util.freed_memory import return_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(1 << 16) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 16)
full = resident("RssAnon")
for block in blocks[:-1]:
    libc.free(block)
freed = resident("RssAnon")
return_freed_memory()
print(full, freed, resident("RssAnon"))
"""


def resident(kind: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def test_what_was_freed_is_given_back() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        return_freed_memory()  # does nothing
        return
    done = subprocess.run([sys.executable, "-c", KEPT_BY_THE_C_LIBRARY], check=True, capture_output=True, text=True)
    full, freed, given_back = map(int, done.stdout.split())
    assert full - freed < 30e6
    assert full - given_back > 100e6


def test_pages_of_a_file_are_released_and_read_again(tmp_path: Path) -> None:
    values = np.arange(4 << 20, dtype=np.int64)
    values.tofile(tmp_path / "numbers")
    with (tmp_path / "numbers").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped = np.frombuffer(mapping, np.int64)
    assert mapped.sum() == values.sum()
    full = resident("RssFile")
    release_pages(mapping, 4096 + 8, values.nbytes - 8192)
    assert full - resident("RssFile") > 0.9 * values.nbytes
    np.testing.assert_array_equal(mapped, values)
