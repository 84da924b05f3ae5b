"""Shapes, strides and sizes of tensors: pure functions over dimensions."""

import math
from collections.abc import Sequence

from trt_kvcache.dtypes import itemsize

#: TensorRT requires tensor addresses that are multiples of this many bytes.
ALIGNMENT = 256

#: A K/V row is moved in accesses of this many bytes, so its size is a multiple of it.
ROW_GRANULE = 16

#: Float32 scales that make a row of this size.
SCALES_GRANULE = ROW_GRANULE // 4

#: The largest ``max_sequence_length`` and other sizes: lengths are int32 on the device.
MAX_DIMENSION = 2**31 - 1

#: The largest ``max_batch_size``: compaction names a slot in 16 bits, and one value of them stands for no slot.
MAX_BATCH_SIZE = 0xFFFF

#: Layers of each kind in a cache, at most: a larger number is a mistake that would take all memory.
MAX_LAYERS = 10_000


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous (row-major) tensor of ``shape``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements are contiguous in row-major order. Dimensions of size 1 are ignored."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a view, both included; 0 for an empty view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def dense_nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a contiguous tensor of this shape."""
    return math.prod(shape) * itemsize(dtype)


def row_nbytes(head_dim: int, dtype: str) -> int:
    """Return the bytes of one K or V row: one token of one head."""
    return head_dim * itemsize(dtype)
