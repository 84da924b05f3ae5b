"""On which GPUs quantized weights exist: compute capabilities of a build, chosen or checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.builder.network.packed_weight import CONSTANT_TYPES
from trt_kvcache.builder.options import BuildOptions, known_compute_capabilities
from trt_kvcache.errors import ConfigError
from trt_kvcache.trt.module import TensorRT

#: The first compute capability with each type of TensorRT. int8 is on all.
FIRST_CAPABILITY = {"int4": "8.0", "float8_e4m3fn": "8.9", "float4_e2m1fn": "12.0"}


def for_codes(options: BuildOptions, kinds: Iterable[str], tensorrt: TensorRT | None, *, rounded: bool = False) -> BuildOptions:
    """Return options that name GPUs which have the types of quantized weights."""
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
    other = "round them to int8" if rounded else "take a checkpoint of the model with other weights"
    for name in options.compute_capabilities:
        if _number(name) < _number(first):
            raise ConfigError(
                f"compute_capabilities: expected {first} or more for weights in {needed}, got {name}. Leave it out, or {other}."
            )
    return options


def are_native(capabilities: Sequence[str] | None, *, is_rtx: bool = True) -> bool:
    """Return whether all GPUs of a build have FP4, so that it need not be stored as int8."""
    first = _number(FIRST_CAPABILITY["float4_e2m1fn"])
    return is_rtx and capabilities is not None and all(_number(name) >= first for name in capabilities)


def _number(capability: str) -> tuple[int, ...]:
    parts = capability.split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"compute_capabilities: expected some such as 8.6, got {short_repr(capability)}.")
    return tuple(map(int, parts))
