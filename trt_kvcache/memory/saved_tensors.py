"""The tensors of a saved slot: allocated together, and checked when they are restored."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.errors import ClosedError, DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import align_up, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


def allocate_tensors(memory: Memory, shapes: Sequence[tuple[int, ...]], dtype: str, *, stream: Any) -> list[DeviceTensor]:
    """Return contiguous tensors that share one allocation, each at a multiple of 256 bytes. Their bytes are not set."""
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + align_up(dense_nbytes(shape, dtype)))
    allocation = memory.allocate(starts[-1], stream=stream)
    return [DeviceTensor(allocation, shape=shape, dtype=dtype, offset=start) for shape, start in zip(shapes, starts, strict=False)]


def check_saved(
    saved: Sequence[DeviceTensor], shapes: Sequence[tuple[int, ...]], dtype: str, memory: Memory, *, per: str, what: str = "saved"
) -> None:
    """Check tensors that a caller wants to restore: one for each shape, contiguous, of a dtype and memory."""
    if isinstance(saved, DeviceTensor) or not isinstance(saved, Sequence):
        raise ShapeError(f"{what}: expected a sequence of tensors, one per {per}, got {type(saved).__name__}.")
    if len(saved) != len(shapes):
        raise ShapeError(f"{what}: expected {len(shapes)} tensors, one per {per}, got {len(saved)}.")
    for index, (tensor, shape) in enumerate(zip(saved, shapes, strict=True)):
        if not isinstance(tensor, DeviceTensor):
            raise PlaceError(f"{what}[{index}]: expected a DeviceTensor of {memory.device}, got {type(tensor).__name__}.")
        if tensor.memory is not memory:
            raise PlaceError(f"{what}[{index}]: expected a tensor of the cache's memory, got one of another ({tensor.memory.device}).")
        if tensor.dtype != dtype:
            raise DTypeError(f"{what}[{index}]: expected {dtype}, got {tensor.dtype}.")
        if tensor.shape != shape:
            raise ShapeError(f"{what}[{index}]: expected shape {shape}, got {tensor.shape}.")
        if not tensor.is_contiguous:
            raise LayoutError(f"{what}[{index}]: expected a dense tensor, got {tensor!r}.")
        if tensor.allocation.closed:
            raise ClosedError(f"{what}[{index}]: the memory of this tensor is closed.")
