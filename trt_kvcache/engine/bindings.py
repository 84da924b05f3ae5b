"""``BindingPlan``: which view each tensor of an engine is bound to; every mismatch is an error before the first enqueue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.kv_layers import KVLayers
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.recurrent_states import RecurrentStates
from trt_kvcache.engine.names import DEFAULT_NAMES, TensorNames
from trt_kvcache.engine.protocol import Engine, EngineProfile, StatefulEngine, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, LayoutError, PlaceError
from trt_kvcache.memory.shapes import ALIGNMENT, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

if TYPE_CHECKING:
    from trt_kvcache.engine.step_buffers import StepBuffers

#: Dimension names by rank.
_Dimensions = Mapping[int, tuple[str, ...]]

_LAYER_DIMENSIONS = ("num_kv_heads", "max_sequence_length", "head_dim")
_CACHE_DIMENSIONS: _Dimensions = {
    4: ("max_batch_size", *_LAYER_DIMENSIONS),
    5: ("max_batch_size", "the number of sides", *_LAYER_DIMENSIONS),
}
_SCALE_DIMENSIONS: _Dimensions = {4: ("max_batch_size", "the number of sides", "num_kv_heads", "tokens of scales")}
_STATE_DIMENSIONS: _Dimensions = {3: ("max_batch_size", "channels", "kernel"), 4: ("max_batch_size", "heads", "head_dim", "state_size")}
_INDEX_DTYPES = ("int32", "int64")
_LOGITS_DTYPES = ("float32", "float16", "bfloat16")


class BindingPlan:
    """The bindings of one engine to one cache, checked when it is made.

    Parameters
    ----------
    engine : Engine
        Built by this package or not; it must have the tensors that ``names`` names, and no others.
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        In the engine's memory, and in the layout that the engine has: COMBINED where K and V of a layer are one tensor, else SEPARATE.
        With one slot, either layout fits. States have two buffers (``ping_pong``) unless the engine updates them in place.
    names : TensorNames
        Names of the engine's tensors.

    Attributes
    ----------
    input_ids, start_index, last_token_ids, logits : TensorSpec
        The tensors of the engine that are not caches.
    new_lengths : TensorSpec or None
        The new tokens of each slot: only engines with states take them.

    Raises
    ------
    BindingError
        A tensor is missing or unknown, or differs in mode, shape, dtype or alias; the engine takes fewer slots than the cache has; or
        no optimisation profile takes a decode step of all slots.
    LayoutError
        A view is not contiguous, or not aligned to 256 bytes.
    PlaceError
        Engine and cache are in different memories.

    Notes
    -----
    A decode step after a decode step binds nothing and sets no shape: see :meth:`prepare`.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, KVCacheManager
    >>> from trt_kvcache.checkpoint import Checkpoint
    >>> from trt_kvcache.engine.decoder_cache import cache_config
    >>> from trt_kvcache.reference import ReferenceEngine
    >>> memory = HostMemory()
    >>> with Checkpoint.open("examples/tiny-llama") as checkpoint:
    ...     config = cache_config(checkpoint.config, max_batch_size=2, max_sequence_length=64, dtype="float32")
    ...     engine = ReferenceEngine(checkpoint, kv=config, max_prefill_length=16, memory=memory)
    >>> plan = BindingPlan(engine, KVCacheManager(config, memory=memory))
    >>> plan.max_width
    16
    >>> plan.profile_for(count=2, width=1)
    1
    """

    def __init__(self, engine: Engine, cache: Cache, *, names: TensorNames = DEFAULT_NAMES) -> None:
        if engine.memory is not cache.memory:
            raise PlaceError(f"engine and cache: expected one memory, got an engine on {engine.memory.device} and a cache on another.")
        self.engine = engine
        self.cache = cache
        self.names = names
        specs = engine.tensors
        kv = cache.kv_layers
        self._pairs = [] if kv is None else [pair for layer in range(len(kv.combined)) for pair in _layer_views(specs, kv, layer, names)]
        for input_name, output_name, view in self._pairs:
            _check_cache_input(_spec(specs, input_name, TensorMode.INPUT), view)
            _check_cache_output(_spec(specs, output_name, TensorMode.OUTPUT), input_name, view)
            _check_address(input_name, view)
        self._constants: list[tuple[str, DeviceTensor]] = []
        for layer, scales in enumerate(() if kv is None else kv.scales):
            self._check_scales(specs, scales, layer, by_token=kv is not None and kv.scale_rows is not None)
        self._states = cache.states
        self._state_pairs = [] if self._states is None else list(_state_views(self._states, names))
        for input_name, output_name, view, other in self._state_pairs:
            _check_cache_input(_spec(specs, input_name, TensorMode.INPUT), view, _STATE_DIMENSIONS)
            _check_state_output(_spec(specs, output_name, TensorMode.OUTPUT), input_name, view, in_place=other is view)
        self._stateful = None if self._states is None or self._states.config.num_buffers == 1 else _stateful(engine)
        self.input_ids = _check_step_tensor(_spec(specs, names.input_ids, TensorMode.INPUT), _INDEX_DTYPES, "B s")
        self.start_index = _check_step_tensor(_spec(specs, names.kvcache_start_index, TensorMode.INPUT), ("int32",), "B")
        self.last_token_ids = _check_step_tensor(_spec(specs, names.last_token_ids, TensorMode.INPUT), _INDEX_DTYPES, "B 1")
        self.logits = _check_step_tensor(_spec(specs, names.logits, TensorMode.OUTPUT), _LOGITS_DTYPES, "B vocab", "B 1 vocab")
        self.new_lengths = (
            None if self._states is None else _check_step_tensor(_spec(specs, names.new_lengths, TensorMode.INPUT), ("int32",), "B")
        )
        _check_all_known(specs, self._known_names())
        _check_batch(engine, cache)
        self._inputs = [(name, view) for name, _, view in self._pairs] + [(name, view) for name, _, view, _ in self._state_pairs]
        self._slot_nbytes = sorted({dense_nbytes(view.shape[1:], view.dtype) for _, view in self._inputs})
        self._state_nbytes = {dense_nbytes(view.shape[1:], view.dtype) for _, _, view, _ in self._state_pairs}
        self._views: dict[tuple[int, int], list[tuple[str, DeviceTensor]]] = {}
        # Of each profile and parity of the states.
        self._first_slot: dict[tuple[int, int], int] = {}
        self._start: dict[tuple[int, int], bool] = {}  # True if the start index of the buffers is bound
        self._shape: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._profile_of: dict[tuple[int, int, int], int] = {}

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.logits.shape[-1]

    @property
    def max_width(self) -> int:
        """Most new tokens per slot in one enqueue of all slots."""
        return max(p.max_width for p in self._profiles_of_all_slots)

    @property
    def max_logits_per_slot(self) -> int:
        """Most new tokens per slot of which one enqueue of all slots returns all logits."""
        if self.last_token_ids.shape[1] != -1 or self.logits.shape[1:-1] != (-1,):
            return 1
        return max(min(p.max_width, p.max_logits) for p in self._profiles_of_all_slots)

    @property
    def _profiles_of_all_slots(self) -> list[EngineProfile]:
        return [p for p in self.engine.profiles if p.max_batch >= self.cache.max_batch_size]

    def can_start_at(self, slot: int) -> bool:
        """Return whether an enqueue may start at a slot.

        Parameters
        ----------
        slot : int
            Index of the first slot.

        Returns
        -------
        bool
            True if the views of all caches from that slot on are aligned to 256 bytes.
        """
        return all(slot * nbytes % ALIGNMENT == 0 for nbytes in self._slot_nbytes)

    def prepare(
        self, first_slot: int, count: int, width: int, buffers: StepBuffers, *, logits: int = 1, starts_in_buffers: bool = False
    ) -> None:
        """Choose the optimisation profile for an enqueue, and bind and set what differs from its last one.

        Addresses are bound once per profile and first slot, and shapes are set when the batch or the width changes, so a decode step
        after a decode step does neither. Engines have a set of bindings for each of two buffers of states.

        Parameters
        ----------
        first_slot, count : int
            The contiguous range of slots to run.
        width : int
            New tokens per slot, padding included.
        buffers : StepBuffers
            Holds the token ids, the start index and the logits.
        logits : int
            Number of new tokens per slot whose logits are wanted.
        starts_in_buffers : bool
            True to have the new tokens begin at the start index of the buffers from slot 0 on too, instead of at the lengths of the cache.

        Raises
        ------
        BindingError
            No profile takes this batch and width, and this number of logits.
        LayoutError
            A view that starts at ``first_slot`` is not aligned.
        EngineError
            The engine refuses an address or a shape.
        """
        profile = self.profile_for(count, width, logits)
        parity = 0
        if self._stateful is not None and self._states is not None:
            parity = self._states.parity
            self._stateful.use_bindings(parity)
        self.engine.use_profile(profile)
        bound = profile, parity
        if self._first_slot.get(bound) != first_slot:
            self._first_slot.pop(bound, None)
            self._bind(first_slot, buffers)
            self._first_slot[bound] = first_slot
        in_buffers = first_slot > 0 or starts_in_buffers
        if self._start.get(bound) != in_buffers:
            self._start.pop(bound, None)
            self.engine.bind(self.names.kvcache_start_index, buffers.start_index if in_buffers else self.cache.lengths.tensor)
            self._start[bound] = in_buffers
        before = self._shape.get(bound)
        if before != (count, width, logits):
            self._shape.pop(bound, None)
            self._set_shapes((count, width, logits), before or (0, 0, 0))
            self._shape[bound] = (count, width, logits)

    def profile_for(self, count: int, width: int, logits: int = 1) -> int:
        """Return the index of the optimisation profile for an enqueue.

        Parameters
        ----------
        count : int
            Slots.
        width : int
            New tokens per slot, padding included.
        logits : int
            Number of new tokens per slot whose logits are wanted.

        Returns
        -------
        int
            The profile with the smallest maximum width that takes them.

        Raises
        ------
        BindingError
            No profile does.
        """
        profile = self._profile_of.get((count, width, logits))
        if profile is None:
            fitting = [index for index, profile in enumerate(self.engine.profiles) if profile.accepts(count, width, logits)]
            if not fitting:
                what = f"{count} slots of {width} new tokens" + (f" with the logits of {logits}" if logits > 1 else "")
                raise BindingError(f"no optimisation profile takes {what}. {_profiles_in_words(self.engine)}")
            profile = min(fitting, key=lambda index: self.engine.profiles[index].max_width)
            self._profile_of[count, width, logits] = profile
        return profile

    def _bind(self, first_slot: int, buffers: StepBuffers) -> None:
        """Bind all tensors but the start index in the profile in use, the caches from ``first_slot`` on."""
        if first_slot and not self.can_start_at(first_slot):
            hint = (
                "States are as large as the model says: run the slots from 0 on."
                if any(first_slot * nbytes % ALIGNMENT for nbytes in self._state_nbytes)
                else "Choose max_sequence_length so that H * S * D * itemsize (for K and V in one, twice that) is a "
                f"multiple of {ALIGNMENT}."
            )
            raise LayoutError(
                f"slot {first_slot}: cache tensors have {self._slot_nbytes} bytes per slot, so a view that starts there is not aligned to "
                f"{ALIGNMENT} bytes. {hint}"
            )
        bind = self.engine.bind
        for name, view in self._views_from(first_slot):
            bind(name, view)
        for name, view in self._constants:
            bind(name, view)
        bind(self.names.input_ids, buffers.input_ids)
        bind(self.names.last_token_ids, buffers.last_token_ids)
        bind(self.names.logits, buffers.logits)
        if buffers.new_lengths is not None:
            bind(self.names.new_lengths, buffers.new_lengths)

    def _views_from(self, first_slot: int) -> list[tuple[str, DeviceTensor]]:
        """Return the names and cache views from a slot on. They are made once for each slot and parity."""
        parity = 0 if self._states is None else self._states.parity
        views = self._views.get((first_slot, parity))
        if views is None:
            parts = [(names, view[first_slot:]) for *names, view in self._pairs]
            views = [(name, part) for names, part in parts for name in names]
            states = [] if self._states is None else _state_views(self._states, self.names)
            for past, present, current, following in states:
                views += [(past, current[first_slot:]), (present, following[first_slot:])]
            self._views[first_slot, parity] = views
        return views

    def _set_shapes(self, sizes: tuple[int, int, int], before: tuple[int, int, int]) -> None:
        """Set the shapes of the inputs that differ from the last enqueue."""
        (count, width, logits), (count_before, _width_before, logits_before) = sizes, before
        set_shape = self.engine.set_input_shape
        set_shape(self.names.input_ids, (count, width))
        if (count, logits) != (count_before, logits_before):
            set_shape(self.names.last_token_ids, (count, logits))
        if count != count_before:
            set_shape(self.names.kvcache_start_index, (count,))
            if self.new_lengths is not None:
                set_shape(self.names.new_lengths, (count,))
            for input_name, view in self._inputs:
                set_shape(input_name, (count, *view.shape[1:]))
            for input_name, view in self._constants:
                set_shape(input_name, view.shape)

    def _check_scales(self, specs: Mapping[str, TensorSpec], view: DeviceTensor, layer: int, *, by_token: bool) -> None:
        """Check the scales of a layer. Scales by token are bound like K and V, static ones once."""
        past, present = self.names.scales_pair(layer)
        if by_token:
            _check_cache_input(_spec(specs, past, TensorMode.INPUT), view, _SCALE_DIMENSIONS)
            _check_cache_output(_spec(specs, present, TensorMode.OUTPUT), past, view)
            _check_address(past, view)
            self._pairs.append((past, present, view))
        else:
            spec = _spec(specs, past, TensorMode.INPUT)
            if (spec.shape, spec.dtype) != (view.shape, view.dtype):
                raise BindingError(
                    f"`{past}`: expected {view.dtype} {view.shape} as the cache has, the engine has {spec.dtype} {spec.shape}."
                )
            self._constants.append((past, view))

    def _known_names(self) -> set[str]:
        """Return the names of all tensors that are bound."""
        step_tensors = {self.names.input_ids, self.names.last_token_ids, self.names.kvcache_start_index, self.names.logits}
        if self.new_lengths is not None:
            step_tensors.add(self.names.new_lengths)
        step_tensors.update(*((input_name, output_name) for input_name, output_name, _ in self._pairs))
        step_tensors.update(*((input_name, output_name) for input_name, output_name, _, _ in self._state_pairs))
        step_tensors.update(name for name, _ in self._constants)
        return step_tensors


def _layer_views(specs: Mapping[str, TensorSpec], kv: KVLayers, layer: int, names: TensorNames) -> Iterator[tuple[str, str, DeviceTensor]]:
    """Yield name of the input, name of the output, and view of each cache tensor of a layer: one combined, or one of K and one of V."""
    combined = names.combined_pair(layer)[0] in specs
    views = (kv.combined[layer],) if combined else kv.separate[layer]
    for pair, view in zip(names.layer_pairs(layer, combined=combined), views, strict=True):
        yield *pair, view


def _state_views(states: RecurrentStates, names: TensorNames) -> Iterator[tuple[str, str, DeviceTensor, DeviceTensor]]:
    """Yield name of the input, name of the output, the current and the next view of each state."""
    for kind in states.kinds:
        for layer, (current, following) in enumerate(zip(states.current(kind).layers, states.next(kind).layers, strict=True)):
            yield *names.state_pair(kind, layer), current, following


def _stateful(engine: Engine) -> StatefulEngine:
    """Return an engine that can hold two sets of bindings, or raise BindingError."""
    if not isinstance(engine, StatefulEngine):
        raise BindingError(
            f"ping_pong: expected an engine with a set of bindings for each buffer of states (use_bindings), got a {type(engine).__name__}."
        )
    return engine


def _spec(specs: Mapping[str, TensorSpec], name: str, mode: TensorMode) -> TensorSpec:
    """Return an input or output by its name. Raises BindingError where the engine has none of this name and mode."""
    spec = specs.get(name)
    if spec is None:
        known = ", ".join(f"`{other}`" for other in specs)
        raise BindingError(
            f"`{name}`: expected an {mode.value} of this name, the engine has {known}. Pass the engine's names as TensorNames."
        )
    if spec.mode is not mode:
        raise BindingError(f"`{name}`: expected an {mode.value}, the engine has an {spec.mode.value} of this name.")
    return spec


def _fits(expected: Sequence[int], got: Sequence[int]) -> bool:
    """Return whether a shape is the expected one, in which -1 stands for any size."""
    return len(expected) == len(got) and all(size in (-1, actual) for size, actual in zip(expected, got, strict=True))


def _check_cache_input(spec: TensorSpec, view: DeviceTensor, dimensions: _Dimensions = _CACHE_DIMENSIONS) -> None:
    """Raise BindingError where dtype or shape of a cache input differ from the view."""
    if spec.dtype != view.dtype or not _fits(spec.shape, view.shape):
        raise BindingError(_cache_mismatch(spec, view, dimensions))


def _check_cache_output(spec: TensorSpec, input_name: str, view: DeviceTensor) -> None:
    """Raise BindingError where a cache output does not share memory with its input, or differs from the view."""
    if spec.alias != input_name:
        aliases = f"shares memory with `{spec.alias}`" if spec.alias else "has separate memory"
        raise BindingError(f"`{spec.name}`: expected an output that shares memory with `{input_name}`, the engine's {aliases}.")
    if spec.dtype != view.dtype or not _fits(spec.shape, view.shape):
        raise BindingError(_cache_mismatch(spec, view))


def _check_state_output(spec: TensorSpec, input_name: str, view: DeviceTensor, *, in_place: bool) -> None:
    """Raise BindingError where a state output differs from the view, or has memory of its own where it should not, or the reverse."""
    if (spec.alias is not None) != in_place or (in_place and spec.alias != input_name):
        expected = f"shares memory with `{input_name}`, as the cache has one buffer of states" if in_place else "has memory of its own"
        aliases = f"shares memory with `{spec.alias}`" if spec.alias else "has separate memory"
        raise BindingError(
            f"`{spec.name}`: expected an output that {expected}, the engine's {aliases}. "
            f"Make the cache with ping_pong={spec.alias is None}."
        )
    _check_cache_input(spec, view, _STATE_DIMENSIONS)


def _cache_mismatch(spec: TensorSpec, view: DeviceTensor, dimensions: _Dimensions = _CACHE_DIMENSIONS) -> str:
    """Return the message of a cache tensor that differs, with the dimensions that do."""
    differences = []
    if spec.dtype != view.dtype:
        differences.append(f"dtype differs (engine {spec.dtype}, cache {view.dtype})")
    if len(spec.shape) == len(view.shape):
        differences += [
            f"{what} differs (engine {size}, cache {actual})"
            for what, size, actual in zip(dimensions[view.ndim], spec.shape, view.shape, strict=True)
            if size not in (-1, actual)
        ]
    else:
        differences.append("the number of dimensions differs")
    return f"`{spec.name}` expects {spec.dtype} {spec.shape}, cache has {view.dtype} {view.shape}: {'; '.join(differences)}."


def _check_address(name: str, view: DeviceTensor) -> None:
    if not view.is_contiguous:
        raise LayoutError(
            f"`{name}`: a view of shape {view.shape} with strides {view.strides} is not contiguous, and TensorRT binds no others. "
            f"Make the cache with {KVLayout.COMBINED if view.ndim == 5 else KVLayout.SEPARATE}."
        )
    if view.ptr % ALIGNMENT:
        raise LayoutError(f"`{name}`: expected an address that is a multiple of {ALIGNMENT}, got {view.ptr:#x}.")


def _check_step_tensor(spec: TensorSpec, dtypes: Sequence[str], *shapes: str) -> TensorSpec:
    if spec.dtype not in dtypes:
        raise BindingError(f"`{spec.name}`: expected {' or '.join(dtypes)}, the engine has {spec.dtype}.")
    if not any(_has_shape(spec, shape.split()) for shape in shapes):
        expected = " or ".join(f"({', '.join(shape.split())})" for shape in shapes)
        raise BindingError(f"`{spec.name}`: expected shape {expected}, the engine has {spec.shape}.")
    return spec


def _has_shape(spec: TensorSpec, shape: Sequence[str]) -> bool:
    """Return whether a tensor has these dimensions: ``vocab`` must be fixed in the engine, ``1`` may also be dynamic."""
    return len(spec.shape) == len(shape) and all(
        size > 0 if name == "vocab" else size in (1, -1) if name == "1" else True for name, size in zip(shape, spec.shape, strict=True)
    )


def _check_all_known(names_of_engine: Iterable[str], known: set[str]) -> None:
    """Raise BindingError where the engine has tensors that are not bound."""
    unknown = [name for name in names_of_engine if name not in known]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise BindingError(
            f"{names}: the engine has tensors that nothing is bound to. More layers than the cache, or another kind of engine?"
        )


def _profiles_in_words(engine: Engine) -> str:
    """Return which batches and widths the engine takes, for messages."""
    profiles = (
        f"{p.name}: batch {p.min_batch}-{p.max_batch}, width {p.min_width}-{p.max_width}"
        + (f", logits 1-{p.max_logits}" if p.max_logits > 1 else "")
        for p in engine.profiles
    )
    return f"The engine has {'; '.join(profiles)}."


def _check_batch(engine: Engine, cache: Cache) -> None:
    """Raise BindingError where the engine cannot run a decode step of all slots of the cache."""
    slots = cache.max_batch_size
    largest = max((profile.max_batch for profile in engine.profiles), default=0)
    if largest < slots:
        raise BindingError(f"max_batch_size: the engine takes {largest} slots, the cache has {slots}. Make the cache with {largest}.")
    if not any(profile.accepts(slots, 1) for profile in engine.profiles):
        raise BindingError(f"no optimisation profile takes a decode step: {slots} slots of 1 new token. {_profiles_in_words(engine)}")
