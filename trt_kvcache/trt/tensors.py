"""Tensors and optimisation profiles of a deserialised engine, read from its ``ICudaEngine``.

Everything is read from the engine itself, so this also works for engines that this package did not build.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.trt.module import TensorRT

#: Smallest and largest shape of an input in one profile.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ProfileRanges:
    """Smallest and largest shape of each input in one optimisation profile."""

    ranges: Mapping[str, ShapeRange]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check the shape of an input."""
        low, high = self.ranges[name]
        fits = len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
        if not fits:
            raise BindingError(f"`{name}`: expected a shape from {low} to {high} in this profile, got {tuple(shape)}.")


def read_tensors(tensorrt: TensorRT, engine: Any) -> dict[str, TensorSpec]:
    """Return inputs and outputs of an engine by name, inputs first; raises EngineError for a tensor in host memory.

    Only KVCacheUpdate layers report aliases (``get_aliased_input_tensor``, from 10.15 on): see :func:`add_plugin_aliases`.
    """
    trt = tensorrt.module
    aliased_input = getattr(engine, "get_aliased_input_tensor", lambda name: None)
    specs = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineError(f"`{name}`: expected a tensor in GPU memory, the engine has it on the host. Such engines are not supported.")
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(engine.get_tensor_shape(name)),
                dtype=tensorrt.dtype_name(engine.get_tensor_dtype(name)),
                mode=TensorMode.INPUT if is_input else TensorMode.OUTPUT,
                alias=None if is_input else aliased_input(name) or None,
            )
        )
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.mode is TensorMode.OUTPUT)}


def add_plugin_aliases(found: Mapping[str, TensorSpec], recorded: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Add the recorded aliases of plugin outputs, which TensorRT does not report."""
    aliases = {spec.name: spec.alias for spec in recorded}
    return {name: spec if spec.alias else replace(spec, alias=aliases.get(name)) for name, spec in found.items()}


def count_binding_sets(tensors: Mapping[str, TensorSpec], names: TensorNames) -> int:
    """Return the number of sets of addresses: 2 where states are read from one buffer and written to another, else 1."""
    states = (tensors.get(names.state_pair(kind, 0)[1]) for kind in StateKind)
    return 2 if any(spec is not None and spec.alias is None for spec in states) else 1


def compare_tensors(found: Mapping[str, TensorSpec], recorded: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Compare the tensors of an engine with those recorded at the build, and return them with the recorded sizes of outputs.

    An output that does not share memory with its cache would lose the new tokens of every step.
    """
    names = {spec.name for spec in recorded}
    if names != set(found):
        different = ", ".join(f"`{name}`" for name in sorted(names ^ set(found)))
        raise EngineError(f"the engine's tensors are not the tensors of its config.json: {different} is only in one of them.")
    records = {spec.name: spec for spec in recorded}
    return {name: _compared(spec, records[name]) for name, spec in found.items()}


def _compared(found: TensorSpec, recorded: TensorSpec) -> TensorSpec:
    """Return the tensor to go by. TensorRT may know a size of an output that was dynamic at the build, or the reverse."""
    difference = f"the engine is not what its config.json says: expected {recorded.describe()}, got {found.describe()}."
    is_output = recorded.mode is TensorMode.OUTPUT and len(found.shape) == len(recorded.shape)
    if replace(found, shape=recorded.shape if is_output else found.shape) != recorded:
        raise EngineError(difference)
    if all(size == expected or -1 in (size, expected) for size, expected in zip(found.shape, recorded.shape, strict=True)):
        return recorded
    warnings.warn(f"{difference} The plan is the recorded one, so it is used.", RuntimeWarning, stacklevel=2)
    return found


def compare_profiles(found: Sequence[EngineProfile], recorded: Sequence[EngineProfile]) -> None:
    """Compare the sizes of optimisation profiles with those that were recorded at the build; names are not compared."""
    sizes = [[(p.min_batch, p.max_batch, p.min_width, p.max_width, p.max_logits) for p in profiles] for profiles in (recorded, found)]
    if sizes[0] != sizes[1]:
        raise EngineError(
            f"the engine is not what its config.json says: expected profiles {sizes[0]} (batch, width, logits), got {sizes[1]}."
        )


def read_ranges(engine: Any, tensors: Mapping[str, TensorSpec]) -> list[ProfileRanges]:
    """Return the shapes that the inputs of an engine take."""
    inputs = [spec for spec in tensors.values() if spec.mode is TensorMode.INPUT]
    return [ProfileRanges({spec.name: _range(engine, spec, index) for spec in inputs}) for index in range(engine.num_optimization_profiles)]


def _range(engine: Any, spec: TensorSpec, profile: int) -> ShapeRange:
    """Return the smallest and largest shape of an input; a static input has no range in the engine."""
    if -1 not in spec.shape:
        return (spec.shape, spec.shape)
    smallest, _, largest = engine.get_tensor_profile_shape(spec.name, profile)
    return (tuple(smallest), tuple(largest))


def read_profiles(ranges: Sequence[ProfileRanges], names: TensorNames) -> tuple[EngineProfile, ...]:
    """Return the optimisation profiles of a decoder, from the shapes of ``input_ids`` ``[B, s]`` and ``last_token_ids`` ``[B, m]``.

    Profiles of one new token per slot are named ``decode``, others ``prefill``.
    """
    return tuple(_profile(profile.ranges, names) for profile in ranges)


def _profile(ranges: Mapping[str, ShapeRange], names: TensorNames) -> EngineProfile:
    input_ids = names.input_ids
    if input_ids not in ranges:
        known = ", ".join(f"`{name}`" for name in ranges)
        raise EngineError(f"`{input_ids}`: the engine has no such input, it has {known}. Pass the engine's names as TensorNames.")
    low, high = ranges[input_ids]
    if len(low) != 2:
        raise EngineError(f"`{input_ids}`: expected two dimensions (slots, new tokens per slot), the engine has {len(low)}.")
    _, last = ranges.get(names.last_token_ids, ((), ()))
    return EngineProfile(
        name="decode" if high[1] == 1 else "prefill",
        min_batch=low[0],
        max_batch=high[0],
        min_width=low[1],
        max_width=high[1],
        max_logits=last[1] if len(last) == 2 else 1,
    )
