"""``SnapshotFile``: a safetensors file with a format number in its metadata and a SHA-256 over all of it.

    8 bytes       length of the header
    header        JSON: the metadata, and the dtype, shape and place of each tensor
    tensors       larger elements first, so that all are aligned
    sha256        the last tensor, uint8 [32]: the hash of every byte before it

Every reader of safetensors can open it. The hash detects damage such as a flipped bit, which safetensors itself does not check.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.atomic_file import atomic_file
from trt_kvcache._util.background_hash import DIGEST_NBYTES, BackgroundHash
from trt_kvcache._util.json_text import JSONTextError, parse_json
from trt_kvcache._util.regular_file import open_regular
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.dtypes import dtype_name, itemsize, numpy_dtype
from trt_kvcache.errors import SnapshotError

#: The format that this package writes. It reads this one and older ones.
FORMAT = 2

_LENGTH_NBYTES = 8
_FORMAT_KEY, _DESCRIPTION_KEY, _DIGEST = "trt_kvcache_snapshot", "description", "sha256"
_CHUNK_NBYTES = 1 << 24

_SAFETENSORS_NAMES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
_DTYPES = {stored: name for name, stored in _SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class SnapshotFile:
    """Contents of a snapshot file."""

    #: Plain JSON values: the producer, the model, the format of the slot and the sampler.
    description: dict[str, Any]
    #: The tensors by name, contiguous; read-only after :meth:`read`.
    arrays: Mapping[str, npt.NDArray[Any]]

    def write(self, path: Path) -> None:
        """Write the file under a temporary name and rename it, so that it appears complete or not at all."""
        arrays = dict(sorted(self.arrays.items(), key=lambda item: -item[1].itemsize))
        header = json.dumps(self._header(arrays), separators=(",", ":")).encode()
        header += b" " * (-len(header) % _LENGTH_NBYTES)
        start: list[bytes | memoryview] = [len(header).to_bytes(_LENGTH_NBYTES, "little"), header]
        with atomic_file(path) as file, BackgroundHash() as sha256:
            for chunk in start + [_bytes(array) for array in arrays.values()]:
                sha256.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())  # while the hash is still at work
            file.write(sha256.digest())

    def _header(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
        metadata = {_FORMAT_KEY: str(FORMAT), _DESCRIPTION_KEY: json.dumps(self.description, separators=(",", ":"))}
        index: dict[str, Any] = {}
        start = 0
        for name, array in {**arrays, _DIGEST: np.empty(DIGEST_NBYTES, np.uint8)}.items():
            end = start + array.nbytes
            index[name] = {"dtype": _SAFETENSORS_NAMES[dtype_name(array.dtype)], "shape": list(array.shape), "data_offsets": [start, end]}
            start = end
        return {"__metadata__": metadata, **index}

    @classmethod
    def read(cls, path: Path) -> SnapshotFile:
        """Read a file into memory and compare it with its hash."""
        try:
            content, digest = _read_hashed(path)
        except (OSError, MemoryError, ValueError) as error:  # NumPy has a ValueError for more bytes than addresses
            raise SnapshotError(f"{path}: cannot be read: {str(error) or 'there is not enough memory'}.") from error
        header, start = _read_header(path, content)
        _check_format(path, header)
        if digest != content[-DIGEST_NBYTES:].tobytes():
            raise SnapshotError(f"{path}: the file was truncated or altered: its SHA-256 differs. Save it again.")
        try:
            return cls(parse_json(header["__metadata__"][_DESCRIPTION_KEY]), _arrays(header, content[start:]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SnapshotError(f"{path}: expected a snapshot, got a file with contradicting contents ({error!s:.300}).") from error


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _read_hashed(path: Path) -> tuple[npt.NDArray[np.uint8], bytes]:
    """Return all bytes of a file, read-only, and the SHA-256 of all but the last 32."""
    with open_regular(path) as file, BackgroundHash() as sha256:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > (memory_nbytes := _machine_nbytes()):  # a sparse file may claim any size
            raise OSError(f"it has {nbytes} bytes, and the memory of this machine {memory_nbytes}")
        content = np.empty(nbytes, np.uint8)
        hashed = content[:-DIGEST_NBYTES]
        for start in range(0, content.size, _CHUNK_NBYTES):
            chunk = content[start : start + _CHUNK_NBYTES].data
            _fill(file, chunk)
            sha256.update(hashed[start : start + _CHUNK_NBYTES].data)
        content.flags.writeable = False
        return content, sha256.digest()


def _fill(file: BinaryIO, chunk: memoryview) -> None:
    """Fill a chunk; one read may return fewer bytes."""
    while len(chunk):
        count = file.readinto(chunk)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it became shorter while it was read")
        chunk = chunk[count:]


def _machine_nbytes() -> int:
    """Return the memory of this machine, or a number that nothing exceeds where the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 62


def _read_header(path: Path, content: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], int]:
    start = _LENGTH_NBYTES + int.from_bytes(content[:_LENGTH_NBYTES].tobytes(), "little")
    try:
        header = parse_json(content[_LENGTH_NBYTES:start].tobytes()) if start <= content.size - DIGEST_NBYTES else None
    except JSONTextError:
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict) or _FORMAT_KEY not in header["__metadata__"]:
        raise SnapshotError(
            f"{path}: expected a snapshot that trt-kvcache saved, got {content.size} bytes that are not one, or are truncated."
        )
    return header, start


def _check_format(path: Path, header: dict[str, Any]) -> None:
    number = header["__metadata__"][_FORMAT_KEY]
    if not isinstance(number, str) or not number.isdecimal() or len(number) > 9 or int(number) < 1:
        raise SnapshotError(f"{path}: format: expected a number of 1 or more, got {short_repr(number)}.")
    if int(number) > FORMAT:
        raise SnapshotError(f"{path}: format: this package reads up to {FORMAT}, got {number}. A newer trt-kvcache saved it: upgrade.")


def _arrays(header: dict[str, Any], payload: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors as read-only arrays over the payload, which they fill without gaps, in the order of the header."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, dtype, shape = end, _DTYPES[entry["dtype"]], tuple(entry["shape"])
        end += math.prod(shape) * itemsize(dtype)
        if entry["data_offsets"] != [start, end] or end > payload.size:
            raise ValueError(f"data_offsets of {name}: {entry['data_offsets']}, expected {[start, end]}")
        arrays[name] = payload[start:end].view(numpy_dtype(dtype)).reshape(shape)
    if end != payload.size or arrays.pop(_DIGEST).shape != (DIGEST_NBYTES,):
        raise ValueError(f"{payload.size - end} bytes too many, or no hash")
    return arrays
