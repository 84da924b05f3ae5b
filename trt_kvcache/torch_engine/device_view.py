"""``device_view``: a ``DeviceTensor`` over a torch tensor, for the kernels of this package."""

from __future__ import annotations

import torch

from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.borrowed_workspace import BorrowedAllocation


def device_view(tensor: torch.Tensor, memory: Memory) -> DeviceTensor:
    """Return a view of a torch tensor, which must live until the launch that uses it: torch reuses memory stream-ordered."""
    storage = tensor.untyped_storage()
    allocation = BorrowedAllocation(memory, storage.nbytes())
    allocation.ptr = storage.data_ptr()
    offset, dtype = tensor.storage_offset() * tensor.itemsize, str(tensor.dtype).removeprefix("torch.")
    return DeviceTensor(allocation, shape=tensor.shape, dtype=dtype, strides=tensor.stride(), offset=offset)
