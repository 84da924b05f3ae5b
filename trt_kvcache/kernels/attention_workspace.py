"""``AttentionWorkspace``: what the blocks of an attention kernel tell each other."""

from __future__ import annotations

import math
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.errors import PlaceError, ShapeError
from trt_kvcache.kernels.layer_views import check_open
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Decode blocks that run on a multiprocessor at once, at most.
MOST_BLOCKS = 2


def partials_shape(blocks: int, group: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape, in float32, of the partial results of so many blocks: what others wait for, and what each keeps for itself.

    For each 16 columns of a row 4 times 4 values, and their maximum and sum.
    """
    return (2, blocks, group, -(-head_dim // 16), 5, 4)


class AttentionWorkspace(Uncopyable):
    """Memory for :func:`~trt_kvcache.kernels.attend`, made once; layers that run one after another share one.

    Parameters
    ----------
    memory : Memory
    num_heads, num_kv_heads, head_dim : int
        The largest of each that a call has; ``num_heads`` for the fewest ``num_kv_heads`` that go with them.
    stream : cuda.core.Stream
        The memory is made and zeroed on it.

    Raises
    ------
    CapacityError, CaptureError, RangeError
        It could not be allocated.
    """

    def __init__(self, memory: Memory, *, num_heads: int, num_kv_heads: int, head_dim: int, stream: Any) -> None:
        int_in_range("num_kv_heads", num_kv_heads, 1)
        group = -(-int_in_range("num_heads", num_heads, num_kv_heads) // num_kv_heads)
        #: Blocks of a decode launch at most.
        self.blocks = 0 if memory.is_host else MOST_BLOCKS * memory.multiprocessor_count  # type: ignore[attr-defined]
        shape = partials_shape(self.blocks, group, int_in_range("head_dim", head_dim, 1))
        allocation = memory.allocate(dense_nbytes(shape, "float32"), zeroed=True, stream=stream)
        #: Partial results, float32.
        self.partials = DeviceTensor(allocation, shape=shape, dtype="float32")

    @property
    def zeroed_nbytes(self) -> int:
        """The first half of the partial results: of each 16 bytes of it, the last 4 are 0 before and after every call."""
        return self.partials.nbytes // 2

    def check(self, name: str, cache: DeviceTensor, num_heads: int) -> None:
        """Check that it serves calls over this cache ``[B, 2, H, S, D]``. Raises PlaceError, ShapeError or ClosedError."""
        _, _, kv_heads, _, head_dim = cache.shape
        if self.partials.memory is not cache.memory:
            raise PlaceError(f"{name}: expected one of {cache.memory.device}, got one of {self.partials.memory.device}.")
        if math.prod(self.partials.shape[2:]) < math.prod(partials_shape(1, num_heads // kv_heads, head_dim)[2:]):
            raise ShapeError(f"{name}: expected one made for {num_heads} over {kv_heads} heads of {head_dim}, got less.")
        check_open(name, self.partials)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.partials.allocation.close()
