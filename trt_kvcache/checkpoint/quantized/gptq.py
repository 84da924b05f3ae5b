"""GPTQ: int4 or int8 with zero points, in groups of inputs, as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.format import (
    FLOATS,
    Arrays,
    QuantizedFormat,
    StoredPart,
    checked_expression,
    divided,
    one_of_field,
)
from trt_kvcache.checkpoint.quantized.group_size import group_size_of
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields

_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Storage of a module's weight."""

    bits: int  # 4 or 8
    group_size: int | None  # inputs that share a scale; None: all
    is_symmetric: bool  # all zero points are the middle of the range
    has_order: bool  # `g_idx` has the group of each input (act-order)

    @property
    def title(self) -> str:
        """Bits, groups and order."""
        groups = "one group" if self.group_size is None else f"groups of {self.group_size}"
        return f"int{self.bits} in {groups}{', act-order' if self.has_order else ''}"


class GPTQ(QuantizedFormat):
    """``qweight`` int32 ``[in / n, out]``, ``qzeros`` int32 ``[groups, out / n]``, ``scales`` ``[groups, out]``, ``g_idx`` int32 ``[in]``.

    Version 1 of the format (``checkpoint_format: gptq``) stores zero points minus 1, version 2 as they are.
    """

    name = "GPTQ"
    kinds = ("uint4", "uint8")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.default = _settings(config, "quantization_config.")
        version = config.get("checkpoint_format") or config.get("format") or "gptq"
        self.version: str = one_of_field("checkpoint_format", version, ("gptq", "gptq_v2"))
        if config.get("pack_dtype") is not None:
            one_of_field("pack_dtype", config["pack_dtype"], ("int32",))
        self.others = _other_settings(config)
        self.title = "GPTQ " + " and ".join(dict.fromkeys(one.title for one in (self.default, *self.others.values())))

    def main_part(self, module: str) -> str:
        """Return ``"qweight"``."""
        return "qweight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        (outputs, inputs), settings = shape, self._of(module)
        together = _WORD_BITS // settings.bits
        groups = -(-inputs // (settings.group_size or inputs))  # the last group may be smaller
        columns = divided(module, "outputs", outputs, together)
        return {
            "qweight": StoredPart(((divided(module, "inputs", inputs, together), outputs),), ("I32",)),
            "qzeros": StoredPart(((groups, columns),), ("I32",)),
            "scales": StoredPart(((groups, outputs),), FLOATS),
            "g_idx": StoredPart(((inputs,),), ("I32",), is_required=settings.has_order),
        }

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        (outputs, inputs), settings = shape, self._of(module)
        kind, group_size = f"uint{settings.bits}", settings.group_size or inputs
        added = 1 if self.version == "gptq" else 0
        groups = -(-inputs // group_size)
        zero_points = QuantizedValues(
            stored=arrays["qzeros"], kind=kind, shape=(outputs, groups), is_transposed=True, packed_axis="rows", added=added
        )
        if settings.is_symmetric:
            self._check_zero_points(module, zero_points, middle=1 << (settings.bits - 1))
        return QuantizedWeight(
            quantized_values=QuantizedValues(stored=arrays["qweight"], kind=kind, shape=shape, is_transposed=True),
            scales=Scales(stored=arrays["scales"].T, block=(1, group_size)),
            zero_points=zero_points,
            group_index=_group_index(module, arrays, inputs, group_size),
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        said = {"format": "gptq", "bits": self.default.bits, "group_size": self.default.group_size, "version": self.version}
        return {**said, "others": {name: [one.bits, one.group_size] for name, one in self.others.items()}} if self.others else said

    def _of(self, module: str) -> Settings:
        """Return the settings of a module: of the first expression in ``dynamic`` that matches its name from the start."""
        return next((one for expression, one in self.others.items() if re.match(expression, module)), self.default)

    def _check_zero_points(self, module: str, zero_points: QuantizedValues, *, middle: int) -> None:
        """Refuse a symmetric checkpoint whose zero points belong to the other version of the format."""
        found = zero_points.unpacked()
        others = {"gptq": ("gptq_v2", middle + 1), "gptq_v2": ("gptq", middle - 1)}
        other, value = others[self.version]
        if bool((found == value).all()):
            raise ConfigError(
                f"quantization_config.checkpoint_format: expected {other!r} by the zero points of {module}, which are all {value} instead "
                f"of {middle}, the only one of a symmetric checkpoint, got {self.version!r}. Correct the field, or `sym`."
            )


def _settings(config: Mapping[str, Any], where: str) -> Settings:
    """Return the settings of all modules, or of an expression in ``dynamic``."""
    fields = ConfigFields(config, where)
    return Settings(
        bits=one_of_field("bits", config.get("bits"), (4, 8)),
        group_size=group_size_of(fields),
        is_symmetric=fields.flag("sym", True),
        has_order=fields.flag("desc_act", False),
    )


def _other_settings(config: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the settings in ``dynamic`` by expression. Modules that it excludes (``-:``) have a plain weight."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(changes, Mapping) for changes in dynamic.values()):
        raise ConfigError(f"quantization_config.dynamic: expected an object of objects, got {short_repr(dynamic)}.")
    found = {}
    for expression, changes in dynamic.items():
        if not expression.startswith("-:"):
            where = f"quantization_config.dynamic[{expression!r}]."
            found[checked_expression(where[:-1], expression.removeprefix("+:"))] = _settings({**config, **changes}, where)
    return found


def _group_index(module: str, arrays: Arrays, inputs: int, group_size: int) -> Any:
    """Return the group of each input, or None for contiguous groups."""
    if "g_idx" not in arrays:
        return None
    found, last = arrays["g_idx"], (inputs - 1) // group_size
    if found.size and not 0 <= found.min() <= found.max() <= last:
        raise ConfigError(f"{module}.g_idx: expected groups from 0 to {last}, got {found.min()} to {found.max()}.")
    return None if np.array_equal(found, np.arange(inputs) // group_size) else found
