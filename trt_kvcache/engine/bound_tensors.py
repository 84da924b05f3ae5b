"""``BoundTensors``: the addresses and shapes that are bound in one profile of an engine, with the checks that TensorRT makes."""

from collections.abc import Mapping, Sequence

from trt_kvcache.engine.bindable import check_bindable
from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor


class BoundTensors:
    """Addresses and input shapes of one profile. Keeps the bound tensors alive."""

    def __init__(self, tensors: Mapping[str, TensorSpec], profile: EngineProfile, names: TensorNames, memory: Memory) -> None:
        self._tensors = tensors
        self._profile = profile
        self._names = names
        self._memory = memory
        self._bound: dict[str, DeviceTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.bind`."""
        check_bindable(self._spec(name), tensor, self._memory)
        self._bound[name] = tensor

    def set_input_shape(self, name: str, shape: Sequence[int]) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.set_input_shape`."""
        spec = self._spec(name)
        if spec.mode is not TensorMode.INPUT:
            raise BindingError(f"`{name}`: expected an input, got an output; its shape follows from the inputs.")
        given = tuple(int(size) for size in shape)
        profile, names = self._profile, self._names
        lowest = step_shape(spec, names, batch=profile.min_batch, width=profile.min_width, logits=1)
        highest = step_shape(spec, names, batch=profile.max_batch, width=profile.max_width, logits=profile.max_logits)
        allowed = list(zip(lowest, highest, strict=True))
        if len(given) != len(allowed) or any(not low <= size <= high for size, (low, high) in zip(given, allowed, strict=False)):
            ranges = ", ".join(f"{low}" if low == high else f"{low}..{high}" for low, high in allowed)
            raise BindingError(f"`{name}`: expected a shape within [{ranges}] (profile {profile.name!r}), got {list(given)}.")
        self._shapes[name] = given

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that was set for an input."""
        if name not in self._shapes:
            raise EngineError(f"`{name}`: no shape was set for profile {self._profile.name!r}. Call set_input_shape first.")
        return self._shapes[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> DeviceTensor:
        """Return the memory bound to ``name`` as a tensor of ``shape`` over the same bytes."""
        tensor = self._bound_tensor(name)
        if dense_nbytes(shape, tensor.dtype) > tensor.nbytes:
            raise EngineError(f"`{name}`: a step of shape {shape} needs more than the {tensor.nbytes} bytes bound, {tensor!r}.")
        alias = self._spec(name).alias
        if alias is not None and self._bound_tensor(alias).ptr != tensor.ptr:
            raise EngineError(
                f"`{name}`: expected the address of `{alias}`, {self._bound_tensor(alias).ptr:#x}, got {tensor.ptr:#x}. "
                "The cache is updated in place: bind both to one view."
            )
        return DeviceTensor(tensor.allocation, shape=shape, dtype=tensor.dtype, offset=tensor.offset)

    def release(self) -> None:
        """Release what is bound."""
        self._bound.clear()

    def _bound_tensor(self, name: str) -> DeviceTensor:
        if name not in self._bound:
            raise EngineError(f"`{name}`: nothing is bound for profile {self._profile.name!r}. Call bind first.")
        return self._bound[name]

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._tensors:
            raise BindingError(f"`{name}`: the engine has no such tensor. It has {', '.join(self._tensors)}.")
        return self._tensors[name]
