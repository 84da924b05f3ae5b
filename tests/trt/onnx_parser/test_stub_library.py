"""The library that Python writes: the loader takes it, and finds through it what another library has."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

import pytest

from trt_kvcache.trt.onnx_parser.stub_library import MACHINES, stub_library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF files are those of Linux")


def load(folder: Path, content: bytes) -> ctypes.CDLL:
    path = folder / "library.so"
    path.write_bytes(content)
    library = ctypes.CDLL(str(path))
    path.unlink()
    return library


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="another machine")
def test_it_has_the_functions_of_the_library_that_it_needs(tmp_path: Path) -> None:
    library = load(tmp_path, stub_library("libtrtkvcachetest.so", needed="libm.so.6", machine=platform.machine()))
    library.cos.restype, library.cos.argtypes = ctypes.c_double, [ctypes.c_double]
    assert library.cos(0.0) == 1.0
    again = ctypes.CDLL("libtrtkvcachetest.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # as the parser opens it: by name
    assert again._handle == library._handle
    with pytest.raises(AttributeError):
        _ = library.there_is_no_such_function


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="another machine")
def test_one_that_needs_a_missing_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libtrtkvcachemissing\.so\.1"):
        load(tmp_path, stub_library("libtrtkvcacheother.so", needed="libtrtkvcachemissing.so.1", machine=platform.machine()))


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_header_and_segments(machine: str, number: int) -> None:
    content = stub_library("liba.so", needed="liba.so.1", machine=machine)
    assert content[:7] == b"\x7fELF\2\1\1"
    assert struct.unpack_from("<HHI", content, 16) == (3, number, 1)
    headers_at, count = struct.unpack_from("<Q", content, 32)[0], struct.unpack_from("<H", content, 56)[0]
    segments = [struct.unpack_from("<IIQQQQQQ", content, headers_at + 56 * index) for index in range(count)]
    kinds = {segment[0]: segment for segment in segments}
    assert set(kinds) == {1, 2, 0x6474E551}  # PT_LOAD, PT_DYNAMIC, PT_GNU_STACK
    assert all(flags & 1 == 0 for _, flags, *_ in segments)  # nothing is executed
    assert kinds[1][5] == len(content)
    _, _, at, *_, nbytes, _, _ = kinds[2]
    entries = dict(struct.iter_unpack("<QQ", content[at : at + nbytes]))
    strings = content[entries[5] : entries[5] + entries[10]]
    names = {tag: strings[entries[tag] :].split(b"\0")[0] for tag in (14, 1)}
    assert names == {14: b"liba.so", 1: b"liba.so.1"}  # DT_SONAME, DT_NEEDED
