"""``StepAncestors``: the tree that the new tokens of each slot of an enqueue form, which an engine reads beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class StepAncestors:
    """int64 ``[A, s]`` of the next enqueue: bit j of a token is set if token j is its ancestor or itself. The address never changes."""

    # A token has the position of the root plus the number of its ancestors. Of the new tokens it attends to its ancestors and itself. K and
    # V are stored in the order of the tokens.

    def __init__(self, memory: Memory, *, max_slots: int) -> None:
        self._memory = memory
        shape = (max_slots * MAX_TREE_TOKENS,)
        self._staging = memory.staging(shape, "int64")
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes(shape, "int64"), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self._table = DeviceTensor(self._allocation, shape=shape, dtype="int64")
        #: True if the next enqueue runs trees; otherwise its tokens are chains, and nothing here is read.
        self.in_use = False

    def of_step(self, slots: int, width: int) -> DeviceTensor:
        """Return the tokens of an enqueue of ``width`` tokens in each slot, at most ``MAX_TREE_TOKENS``."""
        return self._table[: slots * width].reshape(slots, width)

    def write(self, parents: Sequence[Sequence[int]] | None, width: int, *, stream: Any) -> None:
        """Set the parents of the tokens of each slot, -1 for a root; None for chains. The last write must be done."""
        self.in_use = False
        if parents is None:
            return
        count = len(parents) * width
        staged = self._staging[:count].view(np.uint64).reshape(len(parents), width)
        staged[...] = np.uint64(1) << np.arange(width, dtype=np.uint64)  # tokens of padding
        for row, of_slot in zip(staged, parents, strict=True):
            row[: len(of_slot)] = ancestor_bits(of_slot)
        self._memory.upload(self._table[:count], self._staging[:count], stream=stream)
        self.in_use = True

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._allocation.close()


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """Return for each token the set of its ancestors and itself, as the bits of an integer."""
    found: list[int] = []
    for token, parent in enumerate(parents):
        found.append((found[parent] if parent >= 0 else 0) | 1 << token)
    return found
