"""``TokenPaths``: the accepted paths of trees in the memory of the cache, from which kernels move rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class TokenPaths:
    """Indices int32 ``[B, 64]`` and their counts ``[B]``, allocated once, each with a host buffer, pinned for a GPU."""

    def __init__(self, memory: Memory, *, max_slots: int) -> None:
        self._memory, self._max_slots = memory, max_slots
        shape = (max_slots * (MAX_TREE_TOKENS + 1),)
        self._staging = memory.staging(shape, "int32")
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes(shape, "int32"), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self._table = DeviceTensor(self._allocation, shape=shape, dtype="int32")

    def write(self, paths: Sequence[Sequence[int]], *, stream: Any) -> tuple[DeviceTensor, DeviceTensor]:
        """Upload the paths of slots from slot 0 on, and return them with their counts. The last write must be done."""
        slots, first = len(paths), self._max_slots * MAX_TREE_TOKENS
        rows = self._staging[: slots * MAX_TREE_TOKENS].reshape(slots, MAX_TREE_TOKENS)
        for row, path in zip(rows, paths, strict=True):
            row[: len(path)] = path
        self._staging[first : first + slots] = [len(path) for path in paths]
        self._memory.upload(self._table, self._staging, stream=stream)
        return self._table[: slots * MAX_TREE_TOKENS].reshape(slots, MAX_TREE_TOKENS), self._table[first : first + slots]

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._allocation.close()
