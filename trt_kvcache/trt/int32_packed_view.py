"""``Int32PackedView``: a plan whose plugin layers take quantized K and V as int32, seen as an engine over 8-bit values."""

from collections.abc import Sequence

from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.ops.int32_packing import is_packed_as_int32, packed_shape, unpacked_shape
from trt_kvcache.trt.loaded_plan import LoadedPlan
from trt_kvcache.trt.tensors import ProfileRanges


class Int32PackedView:
    """Tensors and shapes of a plan, unpacked (implements :class:`~trt_kvcache.trt.engine_bindings.BindingTarget`).

    TensorRT sees int32 alone: the recorded tensors say which 8-bit type a cache must have.
    """

    def __init__(self, plan: LoadedPlan, recorded: Sequence[TensorSpec]) -> None:
        self._plan = plan
        unpacked = {spec.name: spec for spec in recorded if is_packed_as_int32(spec)}
        self._names = frozenset(unpacked)
        self.tensors = {**plan.tensors, **unpacked}
        self.ranges = [
            ProfileRanges({name: (self._unpacked(name, low), self._unpacked(name, high)) for name, (low, high) in profile.ranges.items()})
            for profile in plan.ranges
        ]

    def _unpacked(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unpacked shape of a tensor."""
        return unpacked_shape(shape) if name in self._names else shape

    def set_tensor_address(self, context: int, name: str, address: int) -> None:
        """See :meth:`LoadedPlan.set_tensor_address <trt_kvcache.trt.loaded_plan.LoadedPlan.set_tensor_address>`."""
        self._plan.set_tensor_address(context, name, address)

    def set_input_shape(self, context: int, name: str, shape: tuple[int, ...]) -> None:
        """See :meth:`LoadedPlan.set_input_shape <trt_kvcache.trt.loaded_plan.LoadedPlan.set_input_shape>`."""
        self._plan.set_input_shape(context, name, packed_shape(shape) if name in self._names else shape)

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """See :meth:`LoadedPlan.tensor_shape <trt_kvcache.trt.loaded_plan.LoadedPlan.tensor_shape>`."""
        return self._unpacked(name, self._plan.tensor_shape(context, name))
