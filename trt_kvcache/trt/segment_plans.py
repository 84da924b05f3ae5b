"""``SegmentPlans``: the deserialised plans of all segments of an engine, behind the interface of a single plan."""

from collections.abc import Mapping, Sequence

from trt_kvcache.engine.decoder_tensors import shape_at, step_shape
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.trt.loaded_plan import LoadedPlan


class SegmentPlans:
    """Passes addresses and shapes on to the segments (implements :class:`~trt_kvcache.trt.engine_bindings.BindingTarget`).

    Parameters
    ----------
    plans : sequence of LoadedPlan
        One for each segment, in order.
    tensors : mapping of str to TensorSpec
        Inputs and outputs of the whole engine.
    intermediates : mapping of str to TensorSpec
        What one stage writes and a later one reads.
    names : TensorNames
        Names of the engine's inputs and outputs. The shape of the token ids ``[B, s]`` gives those of the intermediate tensors.

    Attributes
    ----------
    plans : sequence of LoadedPlan
        As given.
    """

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
        self._warm_profiles: set[int] = set()

    def set_tensor_address(self, profile: int, name: str, address: int) -> None:
        """Set the address of a tensor in every segment that has it.

        Parameters
        ----------
        profile : int
            Index of the optimisation profile.
        name : str
            An input or output.
        address : int
            Device address.

        Raises
        ------
        EngineError
            TensorRT refuses the address; the text is what it logged.
        """
        for plan in self._plans_of.get(name, ()):
            plan.set_tensor_address(profile, name, address)

    def set_input_shape(self, profile: int, name: str, shape: tuple[int, ...]) -> None:
        """Set the shape of an input in every segment that has it; for the token ids, of all intermediate tensors too.

        Parameters
        ----------
        profile : int
            Index of the optimisation profile.
        name : str
            An input.
        shape : tuple of int
            Its new shape.

        Raises
        ------
        EngineError
            TensorRT refuses a shape. All shapes of the profile are forgotten, so that no mixture of old and new ones is enqueued.
        """
        shapes = self._input_shapes.pop(profile, {})
        self._warm_profiles.discard(profile)
        for plan in self._plans_of.get(name, ()):
            plan.set_input_shape(profile, name, shape)
        if name == self._names.input_ids:
            for other, spec in self._intermediates.items():
                for plan in self._plans_of.get(other, ()):
                    if plan.tensors[other].mode is TensorMode.INPUT:
                        plan.set_input_shape(profile, other, shape_at(spec.shape, *shape))
        self._input_shapes[profile] = {**shapes, name: shape}

    def tensor_shape(self, profile: int, name: str) -> tuple[int, ...]:
        """Return the current shape of an input or output of the engine.

        Parameters
        ----------
        profile : int
            Index of the optimisation profile.
        name : str
            An input or output.

        Returns
        -------
        tuple of int
            ``-1`` for sizes that are not known yet.
        """
        spec, shapes = self._tensors[name], self._input_shapes.get(profile, {})
        if spec.mode is TensorMode.INPUT:
            return shapes.get(name, spec.shape)
        ids, last = shapes.get(self._names.input_ids), shapes.get(self._names.last_token_ids)
        if ids is None or last is None:
            return spec.shape
        return step_shape(spec, self._names, batch=ids[0], width=ids[1], logits=last[1])

    def note_eager_run(self, profile: int) -> None:
        """Note that all segments ran eagerly with the current shapes: TensorRT has loaded or compiled what they need.

        Parameters
        ----------
        profile : int
            Index of the optimisation profile.
        """
        self._warm_profiles.add(profile)

    def is_capturable(self, profile: int, stream: int) -> bool:
        """Return whether an enqueue of all segments can be captured now.

        Parameters
        ----------
        profile : int
            Index of the optimisation profile.
        stream : int
            The ``cudaStream_t``.

        Returns
        -------
        bool
            False before the first eager run of the current shapes, or where TensorRT reports that a segment cannot be captured.
        """
        return profile in self._warm_profiles and all(plan.is_capturable(profile, stream) for plan in self.plans)
