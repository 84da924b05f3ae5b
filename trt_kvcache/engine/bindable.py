"""Checks of a tensor before its address is bound: memory, dtype, contiguity and alignment. All engines of this package use them."""

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import BindingError, LayoutError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ALIGNMENT
from trt_kvcache.memory.tensor import DeviceTensor


def check_bindable(spec: TensorSpec, tensor: DeviceTensor, memory: Memory) -> None:
    """Check that ``tensor`` can be bound as ``spec`` to an engine in ``memory``; its shape is not checked.

    ``IExecutionContext.setTensorAddress`` requires an alignment of 256 bytes.
    """
    if tensor.memory is not memory:
        raise BindingError(f"`{spec.name}`: expected a tensor in the engine's memory ({memory.device}), got {tensor!r} in another.")
    if tensor.dtype != spec.dtype:
        raise BindingError(f"`{spec.name}` expects {spec.dtype} {spec.shape}, got {tensor.dtype} {tensor.shape}.")
    if not tensor.is_contiguous:
        raise LayoutError(f"`{spec.name}`: expected a contiguous view, got shape {tensor.shape} with strides {tensor.strides}.")
    if tensor.ptr % ALIGNMENT:
        raise LayoutError(f"`{spec.name}`: expected an address that is a multiple of {ALIGNMENT}, got {tensor.ptr:#x}.")
