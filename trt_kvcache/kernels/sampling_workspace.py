"""``SamplingWorkspace``: memory through which the blocks of a row of logits exchange partial results."""

from __future__ import annotations

from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Bytes of ``RowWorkspace`` in ``plugins/sampling/row_workspace.cuh``, and blocks of a row at most.
ROW_WORKSPACE_NBYTES, MAX_BLOCKS_OF_ROW = 99088, 128

#: Resident blocks of a multiprocessor.
BLOCKS_PER_SM = 2

#: Most likely tokens that are reported for a row, unless a workspace has room for more; and blocks of a row that search for them.
MAX_TOP_LOGPROBS, LOGPROBS_BLOCKS = 20, 32

#: Tokens of a vocabulary, at most: sums of their weights fit into 53 bits.
MAX_VOCAB_SIZE = 1 << 20


class SamplingWorkspace(Uncopyable):
    """Memory for :func:`~trt_kvcache.kernels.choose_tokens` and :func:`~trt_kvcache.kernels.token_logprobs`.

    Parameters
    ----------
    memory : Memory
        Memory of the logits. In host memory the workspace is empty.
    rows : int
        Rows of logits in any call, at most.
    vocab_size : int
        Logits of a row, at most ``2**20``.
    edits : bool
        True for rows with penalties or bias too: up to ``rows * vocab_size * 4`` bytes.
    max_top : int
        Most likely tokens that :func:`~trt_kvcache.kernels.token_logprobs` reports for a row, at most: 256 bytes of a row for each.
    stream : cuda.core.Stream
        The memory is allocated and zeroed on it.

    Raises
    ------
    RangeError
        A size is out of range.
    CapacityError, CaptureError
        The memory could not be allocated.
    """

    def __init__(
        self, memory: Memory, *, rows: int, vocab_size: int, edits: bool = True, max_top: int = MAX_TOP_LOGPROBS, stream: Any
    ) -> None:
        int_in_range("rows", rows, 1)
        int_in_range("vocab_size", vocab_size, 1, MAX_VOCAB_SIZE)
        int_in_range("max_top", max_top, 0)
        #: Blocks of a launch, at most.
        self.blocks = 0 if memory.is_host else BLOCKS_PER_SM * memory.multiprocessor_count  # type: ignore[attr-defined]
        #: Rows that are computed at once, at most.
        self.groups = min(rows, self.blocks)
        self.rows, self.vocab_size, self.max_top = rows, vocab_size, max_top
        shape = (self.groups, ROW_WORKSPACE_NBYTES)
        #: One ``RowWorkspace`` for each group of blocks. Its counts are 0 before and after every call.
        self.meeting = DeviceTensor(memory.allocate(dense_nbytes(shape, "uint8"), zeroed=True, stream=stream), shape=shape, dtype="uint8")
        found = (0 if memory.is_host else rows, 1 + LOGPROBS_BLOCKS * (2 + max_top))
        #: Candidates of the blocks of a row for its log-probabilities. The first word of a row is 0 before and after every call.
        self.found = DeviceTensor(memory.allocate(dense_nbytes(found, "int64"), zeroed=True, stream=stream), shape=found, dtype="int64")
        #: Logits after bias and penalties, if there is room for them.
        self.edited: DeviceTensor | None = None
        if edits:
            self.make_room_for_edits(stream=stream)

    def make_room_for_edits(self, *, stream: Any) -> None:
        """Allocate the memory for rows with penalties or bias, unless it is there already.

        Parameters
        ----------
        stream : cuda.core.Stream
            The memory is allocated on it.

        Raises
        ------
        CapacityError, CaptureError
            The memory could not be allocated.
        """
        if self.edited is None:
            shape = (self.groups, self.vocab_size)
            allocation = self.meeting.memory.allocate(dense_nbytes(shape, "float32"), stream=stream)
            self.edited = DeviceTensor(allocation, shape=shape, dtype="float32")

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.meeting.allocation.close()
        self.found.allocation.close()
        if self.edited is not None:
            self.edited.allocation.close()
