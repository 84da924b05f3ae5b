"""``AttentionWorkspace``: memory in which the blocks of a decode launch hand partial results to each other."""

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

#: Decode blocks that are resident on a multiprocessor at once, at most.
MAX_BLOCKS_PER_SM = 2


def partials_shape(blocks: int, group: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape, in float32, of the partial results of a launch.

    Parameters
    ----------
    blocks : int
        Of the launch.
    group : int
        Query heads for each K/V head.
    head_dim : int
        Elements of a head, D.

    Returns
    -------
    tuple of int
        ``(2, blocks, group, strips, 5, 4)``. A strip is 16 columns of a row: four vectors of 4 values, and one with maximum and sum
        (``plugins/attention/split_kv_reduce.cuh``). First half: flagged vectors for other blocks; second half: what a block keeps.
    """
    return (2, blocks, group, -(-head_dim // 16), 5, 4)


class AttentionWorkspace(Uncopyable):
    """Memory for :func:`~trt_kvcache.kernels.attend`, allocated once. Layers that run one after another share one.

    Parameters
    ----------
    memory : Memory
        Of the cache. In host memory nothing is needed, and the workspace is empty.
    num_heads, num_kv_heads, head_dim : int
        The largest of each in any call; ``num_heads`` with the smallest ``num_kv_heads`` that goes with it.
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
        #: Blocks of a decode launch, at most.
        self.blocks = 0 if memory.is_host else MAX_BLOCKS_PER_SM * memory.multiprocessor_count  # type: ignore[attr-defined]
        shape = partials_shape(self.blocks, group, int_in_range("head_dim", head_dim, 1))
        allocation = memory.allocate(dense_nbytes(shape, "float32"), zeroed=True, stream=stream)
        #: Partial results, float32.
        self.partials = DeviceTensor(allocation, shape=shape, dtype="float32")
        shape = (self.blocks, 128, -(-head_dim // 16), 5, 4)
        a = memory.allocate(dense_nbytes(shape, "float32"), zeroed=True, stream=stream)
        self.extend_partials = DeviceTensor(a, shape=shape, dtype="float32")

    @property
    def zeroed_nbytes(self) -> int:
        """Bytes of the first half, the flagged vectors: the last 4 of each 16 bytes are 0 before and after every call."""
        return self.partials.nbytes // 2

    def check(self, name: str, cache: DeviceTensor, num_heads: int) -> None:
        """Check that it is large enough for calls over a cache.

        Parameters
        ----------
        name : str
            For messages.
        cache : DeviceTensor ``[B, 2, num_kv_heads, S, D]``
            What the calls will run on. Its memory, its number of heads and D are compared with those of the workspace.
        num_heads : int
            Query heads.

        Raises
        ------
        PlaceError
            It is in other memory than the cache.
        ShapeError
            It was made for fewer heads, or a smaller head dim.
        ClosedError
            It is closed.
        """
        _, _, kv_heads, _, head_dim = cache.shape
        if self.partials.memory is not cache.memory:
            raise PlaceError(f"{name}: expected one of {cache.memory.device}, got one of {self.partials.memory.device}.")
        if math.prod(self.partials.shape[2:]) < math.prod(partials_shape(1, num_heads // kv_heads, head_dim)[2:]):
            raise ShapeError(f"{name}: expected one made for {num_heads} over {kv_heads} heads of {head_dim}, got less.")
        check_open(name, self.partials)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.partials.allocation.close()
