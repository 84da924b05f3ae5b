"""One safetensors file, memory-mapped: arrays over the map, no copies."""

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError

_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

# A file starts with the length of its JSON header, a little-endian uint64.
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies in its file.

    ``dtype``: A name of :mod:`trt_kvcache.dtypes`, or safetensors' own name for any other.
    ``shape``: tuple of int.
    ``offset``: Bytes from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """A safetensors file whose tensors are read-only arrays over one memory map.

    The safetensors library opens the file first, which checks its header, the size of every tensor and the size of the
    file. Its NumPy interface copies each tensor, so the arrays come from a map of our own.

    Raises CheckpointError: the file is missing, or is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that are not one ({error}). "
                "It may be truncated: fetch or copy it again."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}.") from error
        self.tensors = _stored_tensors(self._map)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array in its stored dtype, which keeps the map alive."""
        stored = self.tensors[name]
        dtype = numpy_dtype(stored.dtype)
        count = stored.nbytes // dtype.itemsize
        array = np.frombuffer(self._map, dtype=dtype, count=count, offset=stored.offset).reshape(stored.shape)
        if not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array


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
