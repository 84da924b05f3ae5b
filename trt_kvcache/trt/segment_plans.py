"""``SegmentPlans``: the deserialised plans of all segments of an engine, with the interface of a single plan."""

from collections.abc import Mapping, Sequence

from trt_kvcache.engine.decoder_tensors import shape_at, step_shape
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.trt.loaded_plan import LoadedPlan


class SegmentPlans:
    """Passes addresses and shapes on to the segments (implements :class:`~trt_kvcache.trt.engine_bindings.BindingTarget`)."""

    def __init__(
        self, plans: Sequence[LoadedPlan], *, tensors: Mapping[str, TensorSpec], intermediates: Mapping[str, TensorSpec], names: TensorNames
    ) -> None:
        self.plans = plans
        self._tensors = tensors
        self._intermediates = intermediates
        self._names = names
        self._plans_of: dict[str, list[LoadedPlan]] = {}
        for plan in plans:
            for name in plan.tensors:
                self._plans_of.setdefault(name, []).append(plan)
        self._input_shapes: dict[int, dict[str, tuple[int, ...]]] = {}

    def set_tensor_address(self, context: int, name: str, address: int) -> None:
        """Set the address of a tensor in every segment that has it."""
        for plan in self._plans_of.get(name, ()):
            plan.set_tensor_address(context, name, address)

    def set_input_shape(self, context: int, name: str, shape: tuple[int, ...]) -> None:
        """Set the shape of an input in every segment that has it; for the token ids, of all intermediate tensors too.

        If TensorRT refuses one, all shapes of the context are discarded, so that old and new ones never mix.
        """
        shapes = self._input_shapes.pop(context, {})
        for plan in self._plans_of.get(name, ()):
            plan.set_input_shape(context, name, shape)
        if name == self._names.input_ids:
            for other, spec in self._intermediates.items():
                for plan in self._plans_of.get(other, ()):
                    if plan.tensors[other].mode is TensorMode.INPUT:
                        plan.set_input_shape(context, other, shape_at(spec.shape, *shape))
        self._input_shapes[context] = {**shapes, name: shape}

    def tensor_shape(self, context: int, name: str) -> tuple[int, ...]:
        """Return the current shape of an input or output of the engine."""
        spec, shapes = self._tensors[name], self._input_shapes.get(context, {})
        if spec.mode is TensorMode.INPUT:
            return shapes.get(name, spec.shape)
        ids, last = shapes.get(self._names.input_ids), shapes.get(self._names.last_token_ids)
        if ids is None or last is None:
            return spec.shape
        return step_shape(spec, self._names, batch=ids[0], width=ids[1], logits=last[1])
