"""``StepAncestors``: the tree that the new tokens of each slot of an enqueue form, which an engine reads beside its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.dtypes import itemsize
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ModelConfig

#: Input int32 ``[slots, 64, 2]`` of a TensorRT engine that takes trees: memory of :class:`StepAncestors`, each token as two words.
ANCESTORS = "ancestors"

#: Values of int32 in a token of :data:`ANCESTORS`: TensorRT has no int64 of plugins in older releases.
WORDS_PER_TOKEN = 2


#: Input int32 ``[slots, 64]`` of such an engine whose network computes with positions: ancestors of each token; -1 in chains.
DEPTHS = "tree_depths"


def tree_inputs(model: ModelConfig, slots: int) -> tuple[TensorSpec, ...]:
    """Return the inputs of an engine that takes trees of at most this many slots. Of an enqueue the first ``A * s`` tokens count."""
    ancestors = TensorSpec.input(ANCESTORS, (slots, MAX_TREE_TOKENS, WORDS_PER_TOKEN), "int32")
    depths = TensorSpec.input(DEPTHS, (slots, MAX_TREE_TOKENS), "int32")
    mixers = model.attention_layers
    reads_positions = any(mixer.rotates_before_norm or mixer.query_scaling is not None for mixer in mixers)
    return (ancestors, depths) if reads_positions else (ancestors,)


def ancestors_of_step(table: DeviceTensor, q: DeviceTensor) -> DeviceTensor | None:
    """Return the masks int64 ``[B, s]`` of the new tokens ``q`` ``[B, s, ...]`` in the input of an engine; None for too many, or one."""
    slots, width = q.shape[:2]
    if slots > len(table):  # not sooner: when TensorRT builds, the most slots are an estimate
        raise ShapeError(f"{ANCESTORS}: expected {slots} slots or more, got {len(table)}.")
    takes_trees = 1 < width <= MAX_TREE_TOKENS
    return DeviceTensor(table.allocation, shape=(slots, width), dtype="int64", offset=table.offset) if takes_trees else None


class StepAncestors:
    """int64 ``[A, s]`` of the next enqueue: bit j of a token is set if token j is its ancestor or itself. The address never changes."""

    # A token has the position of the root plus the number of its ancestors. Of the new tokens it attends to its ancestors and itself. K and
    # V are stored in the order of the tokens.

    def __init__(self, memory: Memory, *, max_slots: int, is_input: bool = False) -> None:
        """``is_input``: the engine reads it in each enqueue of at most 64 tokens in a slot, so for chains all bits are set; and depths."""
        self._memory, self._is_input = memory, is_input
        self._max_tokens = max_slots * MAX_TREE_TOKENS
        shape = (self._max_tokens + self._max_tokens // WORDS_PER_TOKEN * is_input,)
        self._staging = memory.staging(shape, "int64")
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes(shape, "int64"), zeroed=True, stream=stream)
        self._table = DeviceTensor(self._allocation, shape=shape, dtype="int64")
        #: True if the next enqueue runs trees, or may find some; otherwise its tokens are chains.
        self.in_use = False
        if is_input:
            self.write(None, 0, stream=stream)
        memory.synchronize(stream)

    def of_step(self, slots: int, width: int) -> DeviceTensor:
        """Return the tokens of an enqueue of ``width`` tokens in each slot, at most ``MAX_TREE_TOKENS``."""
        return self._table[: slots * width].reshape(slots, width)

    def written_on_device(self, slots: int, width: int) -> tuple[DeviceTensor, DeviceTensor | None]:
        """Return the tokens ``[slots * width]`` and their depths, None if the engine does not read these, for kernels to write.

        The next enqueues run the trees that are there, until the next :meth:`write`.
        """
        self.in_use, count, depths = True, slots * width, None
        if self._is_input:
            depths = DeviceTensor(self._allocation, shape=(count,), dtype="int32", offset=self._max_tokens * itemsize("int64"))
        return self._table[:count], depths

    @property
    def addresses(self) -> dict[str, int]:
        """Addresses of the inputs, by name."""
        return {ANCESTORS: self._table.ptr, DEPTHS: self._table.ptr + self._max_tokens * itemsize("int64")}

    def write(self, parents: Sequence[Sequence[int]] | None, width: int, *, stream: Any) -> None:
        """Set the parents of the tokens of each slot, -1 for a root; None for chains. The last write must be done."""
        self.in_use = self._is_input  # if it fails, the trees of the last write are still there
        if parents is None:
            if self._is_input:
                self._staging[...] = -1
                self._memory.upload(self._table, self._staging, stream=stream)
            self.in_use = False
            return
        count = len(parents) * width
        staged = self._staging[:count].view(np.uint64).reshape(len(parents), width)
        staged[...] = np.uint64(1) << np.arange(width, dtype=np.uint64)  # tokens of padding
        for row, of_slot in zip(staged, parents, strict=True):
            row[: len(of_slot)] = ancestor_bits(of_slot)
        if self._is_input:
            self._staging[self._max_tokens :].view(np.int32)[:count] = [bits.bit_count() - 1 for bits in staged.ravel().tolist()]
            count = len(self._table)
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
