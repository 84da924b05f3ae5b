"""``SafetensorsFile``: a memory-mapped safetensors file, and the buffers of a new one."""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._util.mapped_pages import release_pages
from trt_kvcache._util.regular_file import open_regular
from trt_kvcache.dtypes import dtype_name, numpy_dtype
from trt_kvcache.errors import CheckpointError

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

#: NumPy dtypes of quantized weights and scales, by their names in safetensors.
_PACKED_DTYPES = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

# A file starts with the length of its JSON header, a little-endian uint64.
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor in its file."""

    dtype: str  # a name of trt_kvcache.dtypes, or the safetensors name of any other dtype
    shape: tuple[int, ...]
    offset: int  # in bytes, from the start of the file
    nbytes: int
    strides: tuple[int, ...] | None = None  # in bytes; None: it is contiguous

    @property
    def span(self) -> int:
        """Bytes from its first element to its last one."""
        if self.strides is None:
            return self.nbytes
        itemsize = self.nbytes // math.prod(self.shape)
        return itemsize + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def safetensors_buffers(tensors: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
    """Return the buffers of a safetensors file in order: header, then tensors (float16, bfloat16 or float32).

    Contiguous tensors are not copied; ``safetensors.numpy.save`` would hold all of them twice.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # wider elements first, so that all are aligned
    codes = {ours: code for code, ours in _DTYPES.items()}
    entries, end = {}, 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        entries[name] = {"dtype": codes[dtype_name(tensors[name].dtype)], "shape": tensors[name].shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    buffers = (np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8) for name in names)
    return [len(header).to_bytes(_LENGTH_BYTES, "little") + header, *buffers]


class SafetensorsFile:
    """A :class:`~trt_kvcache.checkpoint.weight_file.WeightFile` of one safetensors file. Raises CheckpointError if it is damaged."""

    def __init__(self, path: Path, *, keeps_stored_dtype: bool = False) -> None:
        with naming_the_extra():
            from safetensors import SafetensorError, safe_open

        self.path = path
        self.keeps_stored_dtype = keeps_stored_dtype  # if not, tensors are rounded to the dtype of the model, as transformers does
        try:
            with open_regular(path) as file:
                with safe_open(path, framework="numpy"):  # checks the header and all sizes; its arrays would be copies
                    pass
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that are not one ({error}). "
                "It may be truncated: fetch or copy it again."
            ) from error
        except (OSError, MemoryError, OverflowError) as error:  # a sparse file may be larger than memory and address space
            raise CheckpointError(f"{path}: cannot be read: {str(error) or 'there is not enough memory'}.") from error
        self.tensors = _stored_tensors(self._map)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file."""
        return (self.path,)

    def rename(self, names: Mapping[str, str]) -> None:
        """See :meth:`WeightFile.rename <trt_kvcache.checkpoint.weight_file.WeightFile.rename>`."""
        self.tensors = {names[name]: stored for name, stored in self.tensors.items()}

    def add_name(self, name: str, other: str) -> None:
        """Give the tensor ``other`` a second name."""
        self.tensors = {**self.tensors, name: self.tensors[other]}

    def split(self, parts: Mapping[str, Mapping[str, StoredTensor]]) -> None:
        """Replace tensors by others over the same bytes: for each, its parts by name."""
        self.tensors = {name: stored for name, stored in self.tensors.items() if name not in parts}
        for of_one in parts.values():
            self.tensors |= of_one

    def array(self, name: str) -> npt.NDArray[Any]:
        """See :meth:`WeightFile.array <trt_kvcache.checkpoint.weight_file.WeightFile.array>`."""
        stored = self.tensors[name]
        dtype = _PACKED_DTYPES.get(stored.dtype) or numpy_dtype(stored.dtype)
        array: npt.NDArray[Any] = np.ndarray(stored.shape, dtype, self._map, stored.offset, stored.strides)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array

    def release(self, name: str) -> None:
        """See :meth:`WeightFile.release <trt_kvcache.checkpoint.weight_file.WeightFile.release>`."""
        stored = self.tensors[name]
        release_pages(self._map, stored.offset, stored.span)


def _stored_tensors(file: mmap.mmap) -> dict[str, StoredTensor]:
    header_bytes = int.from_bytes(file[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + header_bytes
    header = json.loads(file[_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(
            dtype=_DTYPES.get(entry["dtype"], entry["dtype"]),
            shape=tuple(entry["shape"]),
            offset=start + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
