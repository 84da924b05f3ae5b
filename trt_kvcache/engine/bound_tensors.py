"""``BoundTensors``: the addresses and shapes that are bound in one profile of an engine, with the checks that TensorRT makes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from trt_kvcache.cache.config import DecoderCacheConfig, KVCacheConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.recurrent_states import StateKind, state_storages
from trt_kvcache.engine.bindable import check_bindable
from trt_kvcache.engine.decoder_tensors import step_shape
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

#: Steps whose tensors a profile keeps, the least recently used first out: those of each width, number of slots and first slot.
MAX_STEPS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTensors:
    """Tensors of one step of A slots by s new tokens, over the bound memory and in the shapes of the step."""

    input_ids: DeviceTensor  # [A, s] int32
    start: DeviceTensor  # [A] int32: tokens in the cache before the step
    last: DeviceTensor  # [A, n] int32: indices of the new tokens whose logits are wanted
    logits: DeviceTensor  # [A, vocab] or [A, n, vocab] float32
    caches: tuple[tuple[DeviceTensor, ...], ...]  # of each layer of the cache: K and V [A, H, S, D], or both in one [A, 2, H, S, D]
    new_lengths: DeviceTensor | None  # [A] int32, with states: new tokens of each slot
    states: tuple[Mapping[StateKind, tuple[DeviceTensor, DeviceTensor]], ...]  # of each layer with states: past and present
    scales: tuple[DeviceTensor, ...] = ()  # of each layer of the cache, with quantized K and V
    allocations: frozenset[Allocation]

    @property
    def closed(self) -> bool:
        """True if the owner of a tensor is closed."""
        return any(allocation.closed for allocation in self.allocations)

    def by_attention_layer(self, kv_of_attention: Sequence[int]) -> StepTensors:
        """Return the step with K, V and scales of each attention layer: those that it stores or reads."""
        scales = tuple(self.scales[place] for place in kv_of_attention) if self.scales else ()
        return replace(self, caches=tuple(self.caches[place] for place in kv_of_attention), scales=scales)

    def check_open(self) -> None:
        """Raise ClosedError where the owner of a tensor is closed."""
        if self.closed:
            for allocation in self.allocations:
                _ = allocation.ptr


class BoundTensors:
    """Addresses and input shapes of one profile. Keeps the bound tensors alive."""

    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        profile: EngineProfile,
        *,
        cache: DecoderCacheConfig,
        names: TensorNames,
        memory: Memory,
    ) -> None:
        self._tensors = tensors
        self._profile = profile
        self._cache = cache
        self._names = names
        self._memory = memory
        self._step: StepTensors | None = None  # until an address or a shape changes
        self._steps: OrderedDict[Hashable, StepTensors] = OrderedDict()  # by bound tensors and shapes
        self._bound: dict[str, DeviceTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def bind(self, name: str, tensor: DeviceTensor) -> None:
        """See :meth:`trt_kvcache.engine.protocol.Engine.bind`."""
        check_bindable(self._spec(name), tensor, self._memory)
        self._bound[name] = tensor
        self._step = None

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
        if self._shapes.get(name) != given:
            self._shapes[name] = given
            self._step = None

    def step_tensors(self) -> StepTensors:
        """Return the tensors of the next step: the same object for the same bound tensors and shapes."""
        if self._step is None:
            self._step = self._known_step_tensors()
        self._step.check_open()
        return self._step

    def _known_step_tensors(self) -> StepTensors:
        key = (*self._bound.values(), *self._shapes.values())
        step = self._steps.get(key)
        if step is None:
            step = self._new_step_tensors()
            # Each look at a step asks some hundred owners: only where those of the last one have gone.
            if self._steps and next(reversed(self._steps.values())).closed:
                self._steps = OrderedDict((old, one) for old, one in self._steps.items() if not one.closed)
            self._steps[key] = step
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    def _new_step_tensors(self) -> StepTensors:
        names = self._names
        slots, width = self._shape(names.input_ids)
        for name, spec in self._tensors.items():
            if spec.mode is TensorMode.INPUT and -1 in spec.shape and self._shape(name)[0] != slots:
                raise EngineError(f"`{name}`: expected {slots} slots as `{names.input_ids}` has, got shape {self._shape(name)}.")
        last = self._shape(names.last_token_ids)
        logits = step_shape(self._tensors[names.logits], names, batch=slots, width=width, logits=last[1])
        kv, mamba = self._cache.kv, self._cache.mamba
        kv_layers = range(0 if kv is None else kv.num_layers)
        combined = kv is not None and kv.layout is KVLayout.COMBINED
        storages = {} if mamba is None else state_storages(mamba)
        return StepTensors(
            input_ids=self._tensor(names.input_ids, (slots, width)),
            start=self._tensor(names.kvcache_start_index, (slots,)),
            last=self._tensor(names.last_token_ids, last),
            logits=self._tensor(names.logits, logits),
            caches=tuple(tuple(self._pair(*pair, slots)[1] for pair in names.layer_pairs(layer, combined=combined)) for layer in kv_layers),
            scales=tuple(self._scales(layer, kv, slots) for layer in kv_layers) if kv is not None and kv.has_scales else (),
            new_lengths=None if mamba is None else self._tensor(names.new_lengths, (slots,)),
            states=tuple(
                {kind: self._pair(*names.state_pair(kind, layer), slots) for kind in storages}
                for layer in range(0 if mamba is None else mamba.num_layers)
            ),
            allocations=frozenset(tensor.allocation for tensor in self._bound.values()),
        )

    def _scales(self, layer: int, kv: KVCacheConfig, slots: int) -> DeviceTensor:
        past, present = self._names.scales_pair(layer)
        return self._pair(past, present, slots)[1] if kv.scales_by_token else self._tensor(past, self._tensors[past].shape)

    def _pair(self, past: str, present: str, slots: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return a cache tensor before and after the step: at one address where it is updated in place."""
        shape = (slots, *self._tensors[past].shape[1:])
        return self._tensor(past, shape), self._tensor(present, shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that was set for an input; raises EngineError if none was."""
        if name not in self._shapes:
            raise EngineError(f"`{name}`: no shape was set for profile {self._profile.name!r}. Call set_input_shape first.")
        return self._shapes[name]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> DeviceTensor:
        """Return the memory bound to ``name`` as a tensor of ``shape``; raises EngineError if it is too small, or an alias is elsewhere."""
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
        self._step = None
        self._steps.clear()

    def _bound_tensor(self, name: str) -> DeviceTensor:
        if name not in self._bound:
            raise EngineError(f"`{name}`: nothing is bound for profile {self._profile.name!r}. Call bind first.")
        return self._bound[name]

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._tensors:
            raise BindingError(f"`{name}`: the engine has no such tensor. It has {', '.join(self._tensors)}.")
        return self._tensors[name]
