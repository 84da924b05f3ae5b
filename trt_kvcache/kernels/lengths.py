"""Kernels over the lengths tensor: increment, and store or add values that the host knows."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import as_int
from trt_kvcache.errors import DTypeError, RangeError, ShapeError
from trt_kvcache.kernels.backend import backend_of
from trt_kvcache.kernels.layer_views import check_memory
from trt_kvcache.memory.tensor import DeviceTensor

_INT32_MAX = 2**31 - 1


def check_lengths(lengths: DeviceTensor) -> None:
    """Check that this is a dense int32 tensor (n,)."""
    if lengths.dtype != "int32":
        raise DTypeError(f"length_tensor: expected int32, got {lengths.dtype}.")
    if lengths.ndim != 1 or not lengths.is_contiguous:
        raise ShapeError(f"length_tensor: expected a dense tensor of shape (n,), got {lengths!r}.")


def increment_length_tensor(length_tensor: DeviceTensor, increment: int | DeviceTensor, *, stream: Any) -> None:
    """Add to lengths in place: one number to all, or a tensor element by element.

    Parameters
    ----------
    length_tensor : DeviceTensor (n,) int32
        Changed in place.
    increment : int, or DeviceTensor (n,) int32
        One number for all, or one per length, in the same memory.
    stream : cuda.core.Stream or GraphBuilder
        The launch is ordered on it; the call neither waits nor allocates, and both forms can be captured in a CUDA graph.

    Raises
    ------
    ShapeError, DTypeError, PlaceError, RangeError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    ``incrementLengthTensor`` of TensorRT Edge-LLM (seed 004). Sums are not checked against a capacity here.
    """
    check_lengths(length_tensor)
    length_tensor.memory.check_stream(stream)
    if isinstance(increment, DeviceTensor):
        check_memory("increment", increment, length_tensor.memory)
        if increment.dtype != "int32":
            raise DTypeError(f"increment: expected int32, got {increment.dtype}.")
        if increment.shape != length_tensor.shape or not increment.is_contiguous:
            raise ShapeError(f"increment: expected a dense tensor of shape {length_tensor.shape}, got {increment!r}.")
        if len(length_tensor):
            backend_of(length_tensor.memory).increment_tensor(length_tensor, increment, stream)
        return
    number = as_int("increment", increment)
    if abs(number) > _INT32_MAX:
        raise RangeError(f"increment: expected an int32, got {number}.")
    if len(length_tensor):
        backend_of(length_tensor.memory).increment_scalar(length_tensor, number, stream)


def store_length_values(length_tensor: DeviceTensor, values: Sequence[int], *, accumulate: bool, stream: Any) -> None:
    """Store host values into lengths, or add them.

    The values travel in the arguments of the launch, 16 in each, so there is no staging buffer that a later call could overwrite
    before it was read.

    Parameters
    ----------
    length_tensor : DeviceTensor (n,) int32
        Changed in place.
    values : sequence of int
        One int32 for each length.
    accumulate : bool
        Whether to add the values instead of storing them.
    stream : cuda.core.Stream
        The launch is ordered on it; the call neither waits nor allocates.

    Raises
    ------
    ShapeError, DTypeError, RangeError
        An argument does not fit. Nothing was changed.
    """
    check_lengths(length_tensor)
    length_tensor.memory.check_stream(stream)
    if len(values) != len(length_tensor):
        raise ShapeError(f"values: expected {len(length_tensor)} of them, got {len(values)}.")
    if values and max(map(abs, values)) > _INT32_MAX:
        raise RangeError(f"values: expected int32 values, got {list(values)}.")
    if values:
        backend_of(length_tensor.memory).store_values(length_tensor, values, accumulate, stream)
