"""Tensors as arguments of a launch: addresses, and strides in bytes."""

from __future__ import annotations

from trt_kvcache.dtypes import itemsize
from trt_kvcache.memory.tensor import DeviceTensor


def address(tensor: DeviceTensor | None) -> int:
    """Return the address of a tensor; 0, a null pointer, for none."""
    return 0 if tensor is None else int(tensor.ptr)


def byte_stride(tensor: DeviceTensor, axis: int) -> int:
    """Return the bytes from one index to the next."""
    return tensor.strides[axis] * itemsize(tensor.dtype)


def token_rows(tensor: DeviceTensor | None) -> tuple[int, int, int]:
    """Return address, slot stride and token stride of an activation ``[B, s, ...]``; zeros for none."""
    return (0, 0, 0) if tensor is None else (tensor.ptr, byte_stride(tensor, 0), byte_stride(tensor, 1))
