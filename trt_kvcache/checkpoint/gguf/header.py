"""The header of a GGUF file: its metadata, and the locations of its tensors.

The reader of the ``gguf`` package makes several arrays for every element of an array, and trusts all counts. It takes seconds for a
vocabulary, and minutes or all memory for a damaged file. So this module reads the header itself, in one pass within the bounds of the
file. The package is used for the sizes of blocks, and to dequantize them.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.regular_file import open_regular
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)

#: Limits on the work that a damaged file can cause: far more than any real file has.
_MAX_ENTRIES, _MAX_STRINGS, _MAX_DIMENSIONS, _MAX_NAME = 1 << 16, 1 << 23, 4, 1 << 16
_MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY = 8, 9

#: NumPy dtypes of the scalar types, by their number in the file.
_PLAIN = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL = 7


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file, by its name or its magic bytes."""
    if path.suffix == ".gguf":
        return True
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class StoredBlocks:
    """Location of one tensor in its file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    mapping: mmap.mmap = field(repr=False, compare=False)


@dataclass(frozen=True)
class Texts:
    """An array of texts in a file, read when iterated."""

    mapping: mmap.mmap
    start: int
    count: int

    def __len__(self) -> int:
        """Return the number of texts."""
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        """Yield the bytes of each text."""
        at = self.start
        for _ in range(self.count):
            (length,) = _UINT64.unpack_from(self.mapping, at)
            yield self.mapping[at + 8 : at + 8 + length]
            at += 8 + length


class GGUFHeader:
    """The metadata and the tensor index of a GGUF file; no tensor is read. Raises CheckpointError if it is damaged or no GGUF file."""

    def __init__(self, path: Path) -> None:
        with naming_the_extra():
            import gguf

        self.path = path
        self._sizes = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
        try:
            with open_regular(path) as file:
                self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: expected a GGUF file, got nothing there.") from None
        except (OSError, MemoryError, OverflowError, ValueError) as error:  # a file may be empty, or larger than an address space
            raise CheckpointError(f"{path}: expected a whole GGUF file, got one that cannot be read: {error}.") from error
        self._at = 0
        self._strings = 0
        try:
            tensor_count, field_count = self._preamble()
            self.fields = dict(self._field() for _ in range(field_count))
            self._check_names("field", field_count, len(self.fields))
            self.tensors = self._tensors(tensor_count)
        except (struct.error, OverflowError):  # past its end, or past any
            raise self._damaged("its header ends early") from None

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: expected a whole GGUF file, got one that cannot be read: {reason}. It may be truncated: fetch or copy it again."
        )

    def _preamble(self) -> tuple[int, int]:
        found = self.mapping[:4]
        if found != MAGIC:
            raise self._damaged(f"it begins with {found!r}")
        self._at = 4
        version = self._number(_UINT32)
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            found_as = "one of a big-endian machine" if big_endian else f"version {version}"
            raise CheckpointError(
                f"{self.path}: expected a GGUF file of version {' or '.join(map(str, _VERSIONS))} in little-endian order, got {found_as}. "
                "Convert the model with a current llama.cpp."
            )
        counts = self._number(_UINT64), self._number(_UINT64)
        if max(counts) > _MAX_ENTRIES:
            raise self._damaged(f"it claims {counts[0]} tensors and {counts[1]} fields")
        return counts

    def _number(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self.mapping, self._at)
        self._at += kind.size
        return int(value)

    def _skip(self, nbytes: int) -> int:
        """Skip bytes of the file, and return their offset."""
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self.mapping):
            raise self._damaged(f"its header claims {nbytes} bytes at byte {start}")
        return start

    def _string(self) -> bytes:
        length = self._number(_UINT64)
        start = self._skip(length)
        return self.mapping[start : start + length]

    def _name(self) -> str:
        length = self._number(_UINT64)
        if length > _MAX_NAME:
            raise self._damaged(f"a name of it has {length} bytes")
        start = self._skip(length)
        return self.mapping[start : start + length].decode("utf-8", "replace")

    def _field(self) -> tuple[str, Any]:
        name, code = self._name(), self._number(_UINT32)
        if code == _STRING:
            return name, self._string()
        if code != _ARRAY:
            (value,) = self._plain(name, code, 1).tolist()
            return name, bool(value) if code == _BOOL else value
        item, count = self._number(_UINT32), self._number(_UINT64)
        return name, self._texts(count) if item == _STRING else self._plain(name, item, count)

    def _plain(self, name: str, code: int, count: int) -> npt.NDArray[Any]:
        if code not in _PLAIN:
            raise self._damaged(f"field {short_repr(name)} is of type {code}" + (", an array of arrays" if code == _ARRAY else ""))
        dtype = np.dtype(_PLAIN[code])
        start = self._skip(count * dtype.itemsize)
        return np.frombuffer(self.mapping, dtype=dtype, count=count, offset=start)

    def _texts(self, count: int) -> Texts:
        self._strings += count
        if self._strings > _MAX_STRINGS:
            raise self._damaged(f"it claims {self._strings} texts")
        texts = Texts(self.mapping, self._at, count)
        at, end, unpack = self._at, len(self.mapping), _UINT64.unpack_from
        for _ in range(count):
            at += 8 + unpack(self.mapping, at)[0]
        if at > end:
            raise self._damaged(f"an array of {count} texts goes beyond its end")
        self._at = at
        return texts

    def _check_names(self, what: str, claimed: int, found: int) -> None:
        if claimed != found:
            raise self._damaged(f"{claimed - found} of its {claimed} {what}s have the name of another one")

    def _tensors(self, count: int) -> dict[str, StoredBlocks]:
        entries = [self._tensor() for _ in range(count)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {short_repr(alignment)} and no power of two")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset, nbytes in entries:
            if offset % alignment or start + offset + nbytes > len(self.mapping):
                raise self._damaged(f"{short_repr(name)} has {nbytes} bytes at byte {start + offset}, and the file has {len(self.mapping)}")
            tensors[name] = StoredBlocks(kind=kind, shape=shape, offset=start + offset, nbytes=nbytes, mapping=self.mapping)
        self._check_names("tensor", count, len(tensors))
        return tensors

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name, dimensions = self._name(), self._number(_UINT32)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {short_repr(name)} has {dimensions} dimensions")
        shape = tuple(self._number(_UINT64) for _ in range(dimensions))[::-1]
        code, offset = self._number(_UINT32), self._number(_UINT64)
        if code not in self._sizes:
            raise CheckpointError(
                f"{self.path}: {short_repr(name)}: expected a type that the installed gguf package knows, got number {code}. "
                "A newer gguf package may know it."
            )
        kind, block, block_nbytes = self._sizes[code]
        if shape[-1] % block:
            raise self._damaged(f"{short_repr(name)} has rows of {shape[-1]} elements in blocks of {block}")
        return name, kind, shape, offset, math.prod(shape) // block * block_nbytes
