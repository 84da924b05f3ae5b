"""What an engine asks of a view before it binds its address. The same for every engine."""

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.errors import BindingError, LayoutError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import ALIGNMENT
from trt_kvcache.memory.tensor import DeviceTensor


def check_bindable(spec: TensorSpec, tensor: DeviceTensor, memory: Memory) -> None:
    """Check that ``tensor`` can be bound as ``spec`` to an engine in ``memory``.

    Raises
    ------
    BindingError
        It is in another memory, or has another dtype.
    LayoutError
        It is not dense, or its address is not a multiple of 256.
    """
    if tensor.memory is not memory:
        raise BindingError(f"`{spec.name}`: expected a tensor in the engine's memory ({memory.device}), got {tensor!r} in another.")
    if tensor.dtype != spec.dtype:
        raise BindingError(f"`{spec.name}` expects {spec.dtype} {spec.shape}, got {tensor.dtype} {tensor.shape}.")
    if not tensor.is_contiguous:
        raise LayoutError(f"`{spec.name}`: expected a dense view, got shape {tensor.shape} with strides {tensor.strides}.")
    if tensor.ptr % ALIGNMENT:
        raise LayoutError(f"`{spec.name}`: expected an address that is a multiple of {ALIGNMENT}, got {tensor.ptr:#x}.")
