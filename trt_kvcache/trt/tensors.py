"""Tensors and optimisation profiles of a deserialised engine, read from its ``ICudaEngine``.

Everything is read from the engine itself, so this also works for engines that this package did not build.
"""

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
    """Shapes that the inputs take in one optimisation profile.

    Parameters
    ----------
    ranges : mapping of str to ShapeRange
        Smallest and largest shape of each input.

    Examples
    --------
    >>> decode = ProfileRanges({"input_ids": ((1, 1), (8, 1))})
    >>> decode.check("input_ids", (4, 1))
    >>> decode.check("input_ids", (4, 2))
    Traceback (most recent call last):
        ...
    trt_kvcache.errors.BindingError: `input_ids`: expected a shape from (1, 1) to (8, 1) in this profile, got (4, 2).
    """

    ranges: Mapping[str, ShapeRange]

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Check the shape of an input.

        Parameters
        ----------
        name : str
            An input.
        shape : sequence of int
            The shape to check.

        Raises
        ------
        BindingError
            The input does not take this shape in this profile.
        """
        low, high = self.ranges[name]
        fits = len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))
        if not fits:
            raise BindingError(f"`{name}`: expected a shape from {low} to {high} in this profile, got {tuple(shape)}.")


def read_tensors(tensorrt: TensorRT, engine: Any) -> dict[str, TensorSpec]:
    """Return inputs and outputs of an engine.

    Parameters
    ----------
    tensorrt : TensorRT
        The imported TensorRT.
    engine : ICudaEngine
        The deserialised engine.

    Returns
    -------
    dict of str to TensorSpec
        By name, the inputs first. An output has an alias only where TensorRT reports it: see :func:`add_plugin_aliases`.

    Raises
    ------
    EngineError
        A tensor is in host memory (a shape tensor); a decoder has none.

    Notes
    -----
    ``ICudaEngine.get_aliased_input_tensor`` (full TensorRT from 10.15 on) says which output of a KVCacheUpdate layer shares memory with
    which input, and None or an empty string for any other output.
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
    """Return the tensors of an engine with plugin layers, with the aliases that were recorded at the build.

    TensorRT does not report which outputs of a plugin share memory with an input.

    Parameters
    ----------
    found : mapping of str to TensorSpec
        What :func:`read_tensors` returned.
    recorded : sequence of TensorSpec
        From ``config.json``.

    Returns
    -------
    dict of str to TensorSpec
        As ``found``; an output without an alias has the recorded one.

    Examples
    --------
    >>> recorded = [TensorSpec.output("present", (-1, 2), "float16", alias="past")]
    >>> add_plugin_aliases({"present": TensorSpec.output("present", (-1, 2), "float16")}, recorded)["present"].alias
    'past'
    """
    aliases = {spec.name: spec.alias for spec in recorded}
    return {name: spec if spec.alias else replace(spec, alias=aliases.get(name)) for name, spec in found.items()}


def count_binding_sets(tensors: Mapping[str, TensorSpec], names: TensorNames) -> int:
    """Return how many sets of addresses an engine needs.

    Parameters
    ----------
    tensors : mapping of str to TensorSpec
        Inputs and outputs of the engine.
    names : TensorNames
        What it calls them.

    Returns
    -------
    int
        2 where states have memory of their own after a step: they are read from one buffer and written to the other, in turns. Else 1.

    Examples
    --------
    >>> from trt_kvcache.engine.names import DEFAULT_NAMES
    >>> present = TensorSpec.output("present_conv_state_0", (-1, 64, 3), "float16")
    >>> count_binding_sets({present.name: present}, DEFAULT_NAMES)
    2
    """
    states = (tensors.get(names.state_pair(kind, 0)[1]) for kind in StateKind)
    return 2 if any(spec is not None and spec.alias is None for spec in states) else 1


def compare_tensors(found: Mapping[str, TensorSpec], recorded: Sequence[TensorSpec]) -> None:
    """Compare the tensors of an engine with those that were recorded at the build.

    Parameters
    ----------
    found : mapping of str to TensorSpec
        What :func:`read_tensors` returned.
    recorded : sequence of TensorSpec
        From ``config.json``.

    Raises
    ------
    EngineError
        Names, shapes, dtypes, modes or aliases differ. An output that does not share memory with its cache would lose the new tokens of
        every step.
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
    """Compare the sizes of optimisation profiles with those that were recorded at the build; names are not compared.

    Parameters
    ----------
    found, recorded : sequence of EngineProfile
        Profiles of the engine, and those of ``config.json``.

    Raises
    ------
    EngineError
        They differ.
    """
    sizes = [[(p.min_batch, p.max_batch, p.min_width, p.max_width, p.max_logits) for p in profiles] for profiles in (recorded, found)]
    if sizes[0] != sizes[1]:
        raise EngineError(
            f"the engine is not what its config.json says: expected profiles {sizes[0]} (batch, width, logits), got {sizes[1]}."
        )


def read_ranges(engine: Any, tensors: Mapping[str, TensorSpec]) -> list[ProfileRanges]:
    """Return the shapes that the inputs of an engine take.

    Parameters
    ----------
    engine : ICudaEngine
        The deserialised engine.
    tensors : mapping of str to TensorSpec
        What :func:`read_tensors` returned.

    Returns
    -------
    list of ProfileRanges
        By profile.

    Notes
    -----
    ``ICudaEngine.get_tensor_profile_shape``.
    """
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

    Parameters
    ----------
    ranges : sequence of ProfileRanges
        By profile.
    names : TensorNames
        Names of the engine's inputs and outputs.

    Returns
    -------
    tuple of EngineProfile
        A profile that takes only one new token per slot is called ``decode``, any other ``prefill``.

    Raises
    ------
    EngineError
        There is no such input, or it has another number of dimensions.
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
