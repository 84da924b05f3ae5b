"""Compute capabilities of a build, chosen or checked: those that support the types of quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.builder.network.packed_weight import CONSTANT_TYPES
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import known_compute_capabilities
from trt_kvcache.errors import ConfigError
from trt_kvcache.trt.module import TensorRT

_Options = TypeVar("_Options", bound=BuildOptions)

#: The first compute capability with each type of TensorRT. int8 is on all.
FIRST_CAPABILITY = {"int4": "8.0", "float8_e4m3fn": "8.9", "float4_e2m1fn": "12.0"}


def with_capable_gpus(options: _Options, kinds: Iterable[str], tensorrt: TensorRT | None) -> _Options:
    """Return options with compute capabilities that have the types of quantized weights.

    If none are named, TensorRT for RTX builds for GPUs without a type too, and such an engine fails where it is loaded.
    """
    types = sorted({CONSTANT_TYPES[kind] for kind in kinds} & set(FIRST_CAPABILITY))
    is_rtx = options.flavour != "tensorrt" if tensorrt is None else tensorrt.is_rtx
    if not types or not is_rtx:
        return options
    needed = max(types, key=lambda name: _number(FIRST_CAPABILITY[name]))
    first = FIRST_CAPABILITY[needed]
    if options.compute_capabilities is None:
        if tensorrt is None:
            return options
        capable = (name for name in known_compute_capabilities(tensorrt) if _number(name) >= _number(first))
        return replace(options, compute_capabilities=tuple(capable))
    other = "round them to int8" if options.quantize is not None else "take a checkpoint of the model with other weights"
    for name in options.compute_capabilities:
        if _number(name) < _number(first):
            raise ConfigError(
                f"compute_capabilities: expected {first} or more for weights in {needed}, got {name}. Leave it out, or {other}."
            )
    return options


def have_fp4(capabilities: Sequence[str] | None, *, is_rtx: bool = True) -> bool:
    """Return whether all GPUs of a build have FP4, so that it need not be widened to int8. None means all GPUs."""
    first = _number(FIRST_CAPABILITY["float4_e2m1fn"])
    return is_rtx and capabilities is not None and all(_number(name) >= first for name in capabilities)


def _number(capability: str) -> tuple[int, ...]:
    parts = capability.split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"compute_capabilities: expected some such as 8.6, got {short_repr(capability)}.")
    return tuple(map(int, parts))
