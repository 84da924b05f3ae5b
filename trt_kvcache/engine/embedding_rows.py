"""``EmbeddingRows``: rows that prompts have in place of rows of the embedding, such as the features of an image."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import CapacityError, ConfigError, DTypeError, ShapeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.model_config import ModelConfig

#: Input ``[capacity, hidden]`` of a TensorRT engine: row i is that of token id ``vocab_size + i``. Its address and its shape never change.
EMBEDDING_ROWS = "embedding_rows"


def embedding_tensors(model: ModelConfig, capacity: int, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the input for rows in place of rows of the embedding; none for a capacity of 0."""
    return (TensorSpec.input(EMBEDDING_ROWS, (capacity, model.hidden_size), dtype),) if capacity else ()


def finite_rows(name: str, rows: npt.ArrayLike, width: int, *, dtype: str) -> npt.NDArray[Any]:
    """Return rows ``[n, width]`` in ``dtype``. Raises ShapeError, DTypeError or ConfigError."""
    given = np.asarray(rows)
    if given.dtype.kind != "f" and given.dtype != numpy_dtype("bfloat16"):
        raise DTypeError(f"{name}: expected floating point rows, got {given.dtype}.")
    if given.ndim != 2 or given.shape[1] != width:
        raise ShapeError(f"{name}: expected [n, {width}], got {list(given.shape)}.")
    with np.errstate(over="ignore"):
        values = given.astype(numpy_dtype(dtype))
    if not np.isfinite(values.astype(np.float32)).all():
        raise ConfigError(f"{name}: expected finite values in {dtype}, got others.")
    return values


class EmbeddingRows:
    """Rows by token ids from ``vocab_size`` on, in a table whose address never changes.

    Equal rows have one id, so caches that compare tokens need not know of rows.
    """

    def __init__(self, memory: Memory, *, capacity: int, hidden_size: int, vocab_size: int, dtype: str) -> None:
        self._memory = memory
        self._vocab_size = vocab_size
        self._ids: dict[bytes, int] = {}  # by the hash of the bytes of a row
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes((capacity, hidden_size), dtype), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self.table = DeviceTensor(self._allocation, shape=(capacity, hidden_size), dtype=dtype)

    @property
    def end(self) -> int:
        """First token id without a row."""
        return self._vocab_size + len(self._ids)

    def add(self, values: npt.NDArray[Any], *, stream: Any) -> tuple[int, ...]:
        """Store rows ``[n, hidden]`` of the table's dtype and return their token ids; waits for the copy. Raises CapacityError."""
        keys = [hashlib.sha256(row.tobytes()).digest() for row in values]
        new: dict[bytes, int] = {}  # place of the first row of each
        for place, key in enumerate(keys):
            if key not in self._ids:
                new.setdefault(key, place)
        first, capacity = len(self._ids), self.table.shape[0]
        if first + len(new) > capacity:
            raise CapacityError(
                f"embeddings: expected at most {capacity} different rows in all (max_embeddings), got {first} and {len(new)} more."
            )
        if new:
            self._memory.upload(self.table[first : first + len(new)], np.ascontiguousarray(values[list(new.values())]), stream=stream)
            self._memory.synchronize(stream)
        self._ids |= {key: self._vocab_size + first + place for place, key in enumerate(new)}
        return tuple(self._ids[key] for key in keys)

    def close(self) -> None:
        """Release the table. Idempotent."""
        self._allocation.close()
