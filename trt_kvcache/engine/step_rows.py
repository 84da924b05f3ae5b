"""``StepRows``: hidden states of each token of an enqueue, which an engine reads or writes beside its tensors."""

from __future__ import annotations

from typing import Literal

from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Hidden states that an engine returns with the logits: the output of the final norm, or the residual stream before each of some layers, by
#: index, side by side. The number of layers stands for the end of the residual stream.
HiddenLayers = Literal["final_norm"] | tuple[int, ...]


class StepRows:
    """float32 rows ``[A, s, width]`` of the last enqueue, or of the next one, at an address that never changes."""

    def __init__(self, memory: Memory, *, max_tokens: int, width: int) -> None:
        self.memory = memory
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes((max_tokens, width), "float32"), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self.table = DeviceTensor(self._allocation, shape=(max_tokens, width), dtype="float32")

    @property
    def shape(self) -> tuple[int, int]:
        """Most tokens of an enqueue, and the elements of each."""
        return self.table.shape[0], self.table.shape[1]

    def of_step(self, slots: int, width: int) -> DeviceTensor:
        """Return the rows of an enqueue of ``width`` tokens in each slot."""
        return self.table[: slots * width].reshape(slots, width, self.table.shape[1])

    def close(self) -> None:
        """Release the rows. Idempotent."""
        self._allocation.close()
