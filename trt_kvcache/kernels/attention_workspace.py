"""``AttentionWorkspace``: memory for the partial results that blocks of an attention launch pass to each other."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import PlaceError, ShapeError
from trt_kvcache.kernels.layer_views import check_open
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Resident decode blocks of a multiprocessor, at most.
MAX_BLOCKS_PER_SM = 2

#: Rows of a decode block for several new tokens, at most.
MAX_FEW_ROWS = 32

#: Rows of all resident split-KV prefill blocks of a multiprocessor, at most.
MAX_PREFILL_ROWS_PER_SM = 128


def flagged_rows(multiprocessors: int, group: int) -> int:
    """Return the rows of partial results that the blocks of a launch write for other blocks, at most. ``group``: query heads a K/V head."""
    return multiprocessors * max(MAX_BLOCKS_PER_SM * group, MAX_PREFILL_ROWS_PER_SM)


def partials_shape(multiprocessors: int, group: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape ``(rows, fragments, 5, 4)`` of the float32 partial results of a launch."""
    # A fragment is 16 columns of a row: four vectors of 4 values, and one with maximum and sum (plugins/attention/split_kv_reduce.cuh).
    # First come the flagged rows, for other blocks; then the rows that a decode block keeps for itself.
    own = multiprocessors * max(MAX_BLOCKS_PER_SM * group, MAX_FEW_ROWS)
    return (flagged_rows(multiprocessors, group) + own, fragments_per_row(head_dim), 5, 4)


def fragments_per_row(head_dim: int) -> int:
    """Return the fragments of 16 columns of a row."""
    return -(-head_dim // 16)


class AttentionWorkspace(Uncopyable):
    """Memory for :func:`~trt_kvcache.kernels.attend`, allocated once. Layers that run one after another share one.

    Parameters
    ----------
    memory : Memory
        Memory of the cache. In host memory the workspace is empty.
    num_heads, num_kv_heads, head_dim : int
        Largest sizes of any call; ``num_heads`` with the smallest ``num_kv_heads`` that goes with it.
    stream : cuda.core.Stream
        The memory is allocated and zeroed on it.

    Raises
    ------
    RangeError
        A size is below 1, or ``num_heads`` below ``num_kv_heads``.
    CapacityError, CaptureError
        The memory could not be allocated.
    """

    def __init__(self, memory: Memory, *, num_heads: int, num_kv_heads: int, head_dim: int, stream: Any) -> None:
        int_in_range("num_kv_heads", num_kv_heads, 1)
        group = -(-int_in_range("num_heads", num_heads, num_kv_heads) // num_kv_heads)
        multiprocessors = 0 if memory.is_host else memory.multiprocessor_count  # type: ignore[attr-defined]
        shape = partials_shape(multiprocessors, group, int_in_range("head_dim", head_dim, 1))
        allocation = memory.allocate(dense_nbytes(shape, "float32"), zeroed=True, stream=stream)
        self._set(DeviceTensor(allocation, shape=shape, dtype="float32"), multiprocessors, group)

    def _set(self, partials: DeviceTensor, multiprocessors: int, group: int) -> None:
        #: Partial results, float32, of the shape of :func:`partials_shape`.
        self.partials = partials
        self._group = group
        #: Launch plans of calls on this GPU, by their shapes and dtype.
        self.plans: dict[Hashable, Any] = {}
        #: Bytes of the flagged vectors, at the start: the last 4 of each 16 bytes are 0 before and after every call.
        self.flagged_nbytes = dense_nbytes((flagged_rows(multiprocessors, group), *partials.shape[1:]), "float32")

    def check(self, name: str, cache: DeviceTensor, num_heads: int) -> None:
        """Check that the workspace is large enough for calls over a cache.

        Parameters
        ----------
        name : str
            Name of the argument in messages.
        cache : DeviceTensor ``[B, 2, num_kv_heads, S, D]``
            Cache of the calls: its memory, its heads and D are compared with the workspace.
        num_heads : int
            Query heads.

        Raises
        ------
        PlaceError
            The workspace is in other memory than the cache.
        ShapeError
            The workspace was made for fewer heads, or a smaller head dim.
        ClosedError
            The workspace is closed.
        """
        _, _, kv_heads, _, head_dim = cache.shape
        if self.partials.memory is not cache.memory:
            raise PlaceError(f"{name}: expected one of {cache.memory.device}, got one of {self.partials.memory.device}.")
        fragments, room = fragments_per_row(head_dim), self.partials.shape[1]
        if fragments > room or num_heads // kv_heads * fragments > self._group * room:
            raise ShapeError(f"{name}: expected one made for {num_heads} over {kv_heads} heads of {head_dim}, got less.")
        check_open(name, self.partials)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.partials.allocation.close()
