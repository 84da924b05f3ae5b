"""``StepRows``: a hidden state of each token of an enqueue, which an engine reads or writes beside its tensors."""

from __future__ import annotations

from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class StepRows:
    """float32 rows ``[A, s, hidden]`` of the last enqueue, or of the next one, at an address that never changes."""

    def __init__(self, memory: Memory, *, max_tokens: int, hidden_size: int) -> None:
        self.memory = memory
        stream = memory.create_stream()
        self._allocation = memory.allocate(dense_nbytes((max_tokens, hidden_size), "float32"), zeroed=True, stream=stream)
        memory.synchronize(stream)
        self.table = DeviceTensor(self._allocation, shape=(max_tokens, hidden_size), dtype="float32")

    @property
    def shape(self) -> tuple[int, int]:
        """Most tokens of an enqueue, and the hidden size."""
        return self.table.shape[0], self.table.shape[1]

    def of_step(self, slots: int, width: int) -> DeviceTensor:
        """Return the rows ``[slots, width, hidden]`` of an enqueue."""
        return self.table[: slots * width].reshape(slots, width, self.table.shape[1])

    def close(self) -> None:
        """Release the rows. Idempotent."""
        self._allocation.close()
