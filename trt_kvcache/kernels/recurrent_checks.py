"""Checks of the arguments of recurrent kernels: activations, states, parameters, new lengths."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels.layer_views import check_open, check_place
from trt_kvcache.kernels.source_variants import STATE_DTYPES
from trt_kvcache.memory.shapes import ROW_GRANULE, is_dense
from trt_kvcache.memory.tensor import DeviceTensor


def check_tensor(name: str, tensor: DeviceTensor, like: DeviceTensor, dtype: str, shape: Sequence[int]) -> None:
    """Check memory, dtype and shape."""
    check_place(name, tensor, like)
    if tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}.")
    if tensor.shape != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tensor!r}.")


def check_first(name: str, tensor: DeviceTensor, dimensions: str) -> None:
    """Check the activation that all other arguments are compared with: dimensions such as ``"[B, s, channels]"``."""
    if not isinstance(tensor, DeviceTensor):
        raise PlaceError(f"{name}: expected a DeviceTensor, got {type(tensor).__name__}.")
    check_open(name, tensor)
    if tensor.dtype not in STATE_DTYPES:
        raise DTypeError(f"{name}: expected one of {', '.join(STATE_DTYPES)}, got {tensor.dtype}.")
    if tensor.ndim != len(dimensions.split(",")) or 0 in tensor.shape[1:]:
        raise ShapeError(f"{name}: expected a tensor {dimensions}, got {tensor!r}.")


def check_tokens(name: str, tensor: DeviceTensor, like: DeviceTensor, shape: Sequence[int]) -> None:
    """Check an activation ``[B, s, ...]``: slots and tokens may be strided, a token is contiguous."""
    check_tensor(name, tensor, like, like.dtype, shape)
    if not is_dense(tensor.shape[2:], tensor.strides[2:]) or min(tensor.strides[:2]) < 0:
        raise LayoutError(f"{name}: expected a dense row for each token, got {tensor!r}.")


def has_vectors(tensor: DeviceTensor) -> bool:
    """Return True if every token of an activation starts at a multiple of 16 bytes."""
    apart = [stride for stride, size in zip(tensor.strides[:2], tensor.shape[:2], strict=True) if size > 1]
    return tensor.offset % ROW_GRANULE == 0 and all(stride * itemsize(tensor.dtype) % ROW_GRANULE == 0 for stride in apart)


def check_vectors(name: str, tensor: DeviceTensor) -> None:
    """Check that every token of an activation starts at a multiple of 16 bytes."""
    if not has_vectors(tensor):
        raise LayoutError(f"{name}: expected tokens at multiples of {ROW_GRANULE} bytes, got {tensor!r} at byte {tensor.offset}.")


def check_dense(name: str, tensor: DeviceTensor, like: DeviceTensor, dtype: str, shape: Sequence[int]) -> None:
    """Check a contiguous tensor that starts at a multiple of 16 bytes: a parameter, an output."""
    check_tensor(name, tensor, like, dtype, shape)
    if not tensor.is_contiguous or tensor.offset % ROW_GRANULE:
        raise LayoutError(f"{name}: expected a dense tensor at a multiple of {ROW_GRANULE} bytes, got {tensor!r} at byte {tensor.offset}.")


def check_states(past: DeviceTensor, present: DeviceTensor, like: DeviceTensor, shape: Sequence[int]) -> None:
    """Check a past and a present state: contiguous, of the dtype of the activations or float32."""
    if isinstance(past, DeviceTensor) and past.dtype not in STATE_DTYPES[like.dtype]:
        raise DTypeError(f"past: expected {' or '.join(STATE_DTYPES[like.dtype])} for activations of {like.dtype}, got {past.dtype}.")
    check_dense("past", past, like, getattr(past, "dtype", ""), shape)
    check_dense("present", present, like, past.dtype, shape)


def check_new_lengths(new_lengths: DeviceTensor | None, like: DeviceTensor) -> None:
    """Check the new lengths (B,) int32, if there are any."""
    if new_lengths is not None:
        check_dense("new_lengths", new_lengths, like, "int32", like.shape[:1])
