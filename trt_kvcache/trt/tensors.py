"""What a deserialised engine says of itself: its tensors, its optimisation profiles, and the shapes they take.

Read from ``ICudaEngine``, so it works for engines that this package did not build.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_kvcache.engine.protocol import EngineProfile, TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, EngineError
from trt_kvcache.trt.module import TensorRT

#: Smallest and largest shape of an input in one profile.
ShapeRange = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ProfileRanges:
    """Shapes that the inputs take in one profile."""

    ranges: Mapping[str, ShapeRange]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise :class:`BindingError` if an input does not take ``shape``."""
        low, high = self.ranges[name]
        fits = len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
        if not fits:
            raise BindingError(f"`{name}`: expected a shape from {low} to {high} in this profile, got {tuple(shape)}.")


def read_tensors(tensorrt: TensorRT, engine: Any) -> dict[str, TensorSpec]:
    """Return inputs, then outputs, of an ``ICudaEngine``.

    Raises
    ------
    EngineError
        A tensor is read or written on the host: none of a decoder is.
    """
    trt = tensorrt.module
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
                alias=None if is_input else engine.get_aliased_input_tensor(name),
            )
        )
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.mode is TensorMode.OUTPUT)}


def compare_tensors(found: Mapping[str, TensorSpec], recorded: Sequence[TensorSpec]) -> None:
    """Compare what was deserialised with what was built: names, shapes, dtypes, modes and the alias map.

    Raises :class:`EngineError`: an output that does not share memory with its cache would lose every step.
    """
    names = {spec.name for spec in recorded}
    if names != set(found):
        different = ", ".join(f"`{name}`" for name in sorted(names ^ set(found)))
        raise EngineError(f"the engine's tensors are not those of its config.json: {different} is only in one of them.")
    for spec in recorded:
        if found[spec.name] != spec:
            raise EngineError(
                f"the engine is not what its config.json says: expected {spec.describe()}, got {found[spec.name].describe()}."
            )


def compare_profiles(found: Sequence[EngineProfile], recorded: Sequence[EngineProfile]) -> None:
    """Compare the sizes of the profiles with those that were built. Raises :class:`EngineError`."""
    sizes = [[(p.min_batch, p.max_batch, p.min_width, p.max_width) for p in profiles] for profiles in (recorded, found)]
    if sizes[0] != sizes[1]:
        raise EngineError(f"the engine is not what its config.json says: expected profiles {sizes[0]} (batch, width), got {sizes[1]}.")


def read_ranges(engine: Any, tensors: Mapping[str, TensorSpec]) -> list[ProfileRanges]:
    """Return the shapes that the inputs take, per profile."""
    inputs = [spec for spec in tensors.values() if spec.mode is TensorMode.INPUT]
    return [ProfileRanges({spec.name: _range(engine, spec, index) for spec in inputs}) for index in range(engine.num_optimization_profiles)]


def _range(engine: Any, spec: TensorSpec, profile: int) -> ShapeRange:
    if -1 not in spec.shape:
        return (spec.shape, spec.shape)
    smallest, _, largest = engine.get_tensor_profile_shape(spec.name, profile)
    return (tuple(smallest), tuple(largest))


def read_profiles(ranges: Sequence[ProfileRanges], input_ids: str) -> tuple[EngineProfile, ...]:
    """Return the profiles in the words of a decoder, from the shapes of its token ids ``[B, s]``.

    A profile that takes one token per slot only is called ``decode``, any other ``prefill``.

    Raises
    ------
    EngineError
        There is no such input, or it has another number of dimensions.
    """
    return tuple(_profile(profile.ranges, input_ids) for profile in ranges)


def _profile(ranges: Mapping[str, ShapeRange], input_ids: str) -> EngineProfile:
    if input_ids not in ranges:
        known = ", ".join(f"`{name}`" for name in ranges)
        raise EngineError(f"`{input_ids}`: the engine has no such input, it has {known}. Give its names as TensorNames.")
    low, high = ranges[input_ids]
    if len(low) != 2:
        raise EngineError(f"`{input_ids}`: expected two dimensions (slots, new tokens per slot), the engine has {len(low)}.")
    name = "decode" if high[1] == 1 else "prefill"
    return EngineProfile(name=name, min_batch=low[0], max_batch=high[0], min_width=low[1], max_width=high[1])
