"""Views of K/V layers: checks that kernels can address them, and the view of one slot."""

from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ClosedError, DTypeError, LayoutError, PlaceError, ShapeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ROW_GRANULE, is_dense, row_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Dimensions of a layer of a cache ``[B, 2, H, S, D]``, and of a saved layer ``[2, H, n, D]``.
CACHE_NDIM, SAVED_NDIM = 5, 4


def check_layer(name: str, view: DeviceTensor, ndim: int) -> None:
    """Check shape, contiguous heads, 16-byte alignment and open memory of a layer. Slots and K/V may be strided, without overlap."""
    if not isinstance(view, DeviceTensor):
        raise PlaceError(f"{name}: expected a DeviceTensor, got {type(view).__name__}.")
    shape = "[B, 2, H, S, D]" if ndim == CACHE_NDIM else "[2, H, n, D]"
    if view.ndim != ndim or view.shape[-4] != 2 or view.shape[-3] < 1:
        raise ShapeError(f"{name}: expected a tensor {shape}, got {view!r}.")
    size = itemsize(view.dtype)
    if row_nbytes(view.shape[-1], view.dtype) % ROW_GRANULE or not view.shape[-1]:
        raise ShapeError(f"{name}: expected rows of a multiple of {ROW_GRANULE} bytes, got {view!r}.")
    if ndim == SAVED_NDIM and not view.is_contiguous:
        raise LayoutError(f"{name}: expected a dense tensor {shape}, got {view!r}.")
    if not is_dense(view.shape[-3:], view.strides[-3:]):
        raise LayoutError(f"{name}: expected dense heads [H, S, D], got {view!r}.")
    outer = sorted((stride, count) for stride, count in zip(view.strides[:-3], view.shape[:-3], strict=True) if count > 1)
    extent = view.shape[-3] * view.shape[-2] * view.shape[-1]
    for stride, count in outer:
        if stride < extent:
            raise LayoutError(f"{name}: slots, or K and V, overlap: {view!r}.")
        extent += (count - 1) * stride
    if any(stride * size % ROW_GRANULE for stride, _ in outer) or view.offset % ROW_GRANULE:
        raise LayoutError(f"{name}: expected slots, K and V at multiples of {ROW_GRANULE} bytes, got {view!r} at byte {view.offset}.")
    check_open(name, view)


def check_same(what: str, first: DeviceTensor, name: str, view: DeviceTensor) -> None:
    """Check that two layers are of one memory, dtype and head dim."""
    check_memory(name, view, first.memory)
    if view.dtype != first.dtype:
        raise DTypeError(f"{name}: expected {first.dtype} as {what}, got {view.dtype}.")
    if view.shape[-1] != first.shape[-1]:
        raise ShapeError(f"{name}: expected head_dim {first.shape[-1]} as {what}, got {view.shape[-1]}.")


def check_place(name: str, tensor: DeviceTensor, like: DeviceTensor) -> None:
    """Check that this is an open tensor in the memory of ``like``, which may be the tensor itself."""
    if not isinstance(tensor, DeviceTensor):
        raise PlaceError(f"{name}: expected a DeviceTensor, got {type(tensor).__name__}.")
    check_memory(name, tensor, like.memory)
    check_open(name, tensor)


def check_memory(name: str, tensor: DeviceTensor, memory: Memory) -> None:
    """Check that a tensor is in this memory."""
    if tensor.memory is not memory:
        raise PlaceError(f"{name}: expected a tensor of {memory.device}, got one of {tensor.memory.device}.")


def check_open(name: str, tensor: DeviceTensor) -> None:
    """Check that the memory of a tensor is not closed."""
    if tensor.allocation.closed:
        raise ClosedError(f"{name}: its memory is closed.")


def slot_view(layer: DeviceTensor, slot: int) -> DeviceTensor:
    """Return K and V of one slot, ``[2, H, S, D]``, of a layer ``[B, 2, H, S, D]``."""
    return DeviceTensor(
        layer.allocation,
        shape=layer.shape[1:],
        dtype=layer.dtype,
        strides=layer.strides[1:],
        offset=layer.offset + slot * layer.strides[0] * itemsize(layer.dtype),
    )
