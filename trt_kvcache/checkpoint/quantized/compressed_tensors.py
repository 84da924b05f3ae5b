"""compressed-tensors: integers, FP8 and FP4, by groups of modules, as llm-compressor writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.format import (
    FLOATS,
    Arrays,
    QuantizedFormat,
    StoredPart,
    checked_expression,
    constant,
    divided,
    groups_of,
    one_of_field,
)
from trt_kvcache.checkpoint.quantized.fp8_blocks import WEIGHT_ONLY
from trt_kvcache.checkpoint.quantized.group_size import group_size_of
from trt_kvcache.checkpoint.quantized.quantized_values import VALUE_BITS, QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields

_WORD_BITS = 32
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FP4_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Quantization scheme of a group of modules."""

    packing: str  # `format` of the group
    kind: str  # of quantized values, a key of VALUE_BITS
    targets: tuple[str, ...]  # module names, suffixes of them, "re:" and an expression, or "Linear" for all
    block: tuple[int | None, int | None]  # rows and columns that share a scale; None: all
    has_zero_points: bool
    has_order: bool  # groups are not contiguous (act-order)

    @property
    def title(self) -> str:
        """The packing, and the block that shares a scale."""
        rows, columns = self.block
        if rows is None:
            return f"{self.kind} ({self.packing}), one scale a matrix"
        if columns is None:
            return f"{self.kind} ({self.packing}), one scale a row"
        return f"{self.kind} ({self.packing}) in groups of {columns}" if rows == 1 else f"{self.kind} in blocks of {rows} x {columns}"

    def targets_module(self, module: str) -> bool:
        """Return True if a linear module belongs to the group."""
        for target in self.targets:
            if target.startswith("re:"):
                if re.match(target[3:], module):
                    return True
            elif target == "Linear" or module == target or module.endswith(f".{target}"):
                return True
        return False


def kv_dtype_of_scheme(scheme: object) -> str | None:
    """Return the dtype of K and V for the static scales of a ``kv_cache_scheme``; None without any."""
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8 or scheme.get("dynamic") or not scheme.get("symmetric", True):
        return None
    return {"float": "float8_e4m3fn", "int": "int8"}.get(str(scheme.get("type")))


class CompressedTensors(QuantizedFormat):
    """Quantized values in ``weight`` or ``weight_packed``, scales in ``weight_scale``; further tensors depend on the packing."""

    name = "compressed-tensors"
    kinds = ("int4", "int8", "e4m3", "e2m1")
    ignored = (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
        ".q_scale",
        ".k_scale",
        ".v_scale",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        one_of_field("quantization_status", config.get("quantization_status") or "compressed", ("compressed", "frozen"))
        for name in ("sparsity_config", "transform_config"):
            value = config.get(name)
            if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
                raise ConfigError(f"quantization_config.{name}: expected nothing, got {short_repr(value)}.")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"quantization_config.config_groups: expected an object of groups, got {short_repr(groups)}.")
        self.schemes = tuple(_scheme(f"config_groups.{name}", group, config.get("format")) for name, group in groups.items())
        self.title = "compressed-tensors " + " and ".join(sorted({scheme.title for scheme in self.schemes}))
        self.notes = (WEIGHT_ONLY,) if any(group.get("input_activations") for group in groups.values()) else ()
        self.kv_dtype = kv_dtype_of_scheme(config.get("kv_cache_scheme"))

    def main_part(self, module: str) -> str:
        """Return ``"weight_packed"`` or ``"weight"``."""
        scheme = self._scheme_of(module)
        return "weight_packed" if scheme is not None and "pack" in scheme.packing else "weight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        scheme, (outputs, inputs) = self._known_scheme(module), shape
        bits = VALUE_BITS[scheme.kind]
        if scheme.kind == "e2m1":
            groups = groups_of(module, inputs, _FP4_GROUPS[scheme.packing])
            parts = {"weight_packed": StoredPart(((outputs, divided(module, "inputs", inputs, 2)),), ("U8",))}
            if scheme.packing == "mxfp4-pack-quantized":
                return {**parts, "weight_scale": StoredPart(((outputs, groups),), ("U8", "F8_E8M0"))}
            scale = StoredPart(((outputs, groups),), ("F8_E4M3",))
            return {**parts, "weight_scale": scale, "weight_global_scale": StoredPart(((1,), ()), ("float32",))}
        of_scales = _shapes_of_scales(scheme, shape)
        scales = {"weight_scale": StoredPart(of_scales, FLOATS)}
        order = {"weight_g_idx": StoredPart(((inputs,),), ("I32",), is_required=scheme.has_order)}
        if scheme.packing != "pack-quantized":
            zeros = {"weight_zero_point": StoredPart(of_scales, ("I8",))} if scheme.has_zero_points else {}
            return {"weight": StoredPart((shape,), ("F8_E4M3" if scheme.kind == "e4m3" else "I8",)), **scales, **zeros, **order}
        packed = StoredPart(((outputs, -(-inputs * bits // _WORD_BITS)),), ("I32",))
        rows, columns = of_scales[0]
        zeros = {"weight_zero_point": StoredPart(((-(-rows * bits // _WORD_BITS), columns),), ("I32",))} if scheme.has_zero_points else {}
        return {"weight_packed": packed, **scales, "weight_shape": StoredPart(((2,),), ("I64", "I32")), **zeros, **order}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        scheme = self._known_scheme(module)
        if scheme.kind == "e2m1":
            values = QuantizedValues(stored=arrays["weight_packed"], kind="e2m1", shape=shape)
            return QuantizedWeight(quantized_values=values, scales=_fp4_scales(module, scheme, arrays))
        rows, columns = scheme.block
        of_blocks = _shapes_of_scales(scheme, shape)[0]
        scales = Scales(stored=arrays["weight_scale"].reshape(of_blocks), block=(rows or shape[0], columns or shape[1]))
        if scheme.packing == "pack-quantized":
            if tuple(arrays["weight_shape"].tolist()) != shape:
                raise ConfigError(f"{module}.weight_shape: expected {list(shape)}, got {arrays['weight_shape'].tolist()}.")
            added = 1 << (VALUE_BITS[scheme.kind] - 1)
            values = QuantizedValues(stored=arrays["weight_packed"], kind=scheme.kind, shape=shape, added=added)
        else:
            values, added = QuantizedValues(stored=arrays["weight"], kind=scheme.kind, shape=shape), 0
        zeros = None
        if scheme.has_zero_points:
            stored = arrays["weight_zero_point"].reshape(arrays["weight_zero_point"].shape if added else of_blocks)
            zeros = QuantizedValues(stored=stored, kind=scheme.kind, shape=of_blocks, packed_axis="rows", added=added)
        return QuantizedWeight(
            quantized_values=values, scales=scales, zero_points=zeros, group_index=_group_index(module, arrays, scales.block[1])
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "compressed-tensors", "schemes": [asdict(scheme) for scheme in self.schemes]}

    def _scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module: one that names it comes before one of all linear modules."""
        named = [scheme for scheme in self.schemes if scheme.targets_module(module)]
        return min(named, key=lambda scheme: "Linear" in scheme.targets, default=None)

    def _known_scheme(self, module: str) -> Scheme:
        scheme = self._scheme_of(module)
        if scheme is None:
            raise ConfigError(f"quantization_config.config_groups: expected a group with {module} among its targets, got none.")
        return scheme


def _scheme(name: str, group: Any, packing: Any) -> Scheme:
    """Return the scheme of a group in ``config_groups``."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(f"quantization_config.{name}.weights: expected an object, got {short_repr(weights)}.")
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"quantization_config.{name}.targets: expected a list of names, got {short_repr(targets)}.")
    for target in targets:
        if target.startswith("re:"):
            checked_expression(f"quantization_config.{name}.targets", target.removeprefix("re:"))
    packing = one_of_field("format", group.get("format") or packing, _FORMATS)
    is_float = one_of_field(f"{name}.weights.type", weights.get("type", "int"), ("int", "float")) == "float"
    is_fp4 = packing in _FP4_GROUPS
    bits = one_of_field(f"{name}.weights.num_bits", weights.get("num_bits", 8), (4,) if is_fp4 else (4, 8) if "pack" in packing else (8,))
    if is_float is not (is_fp4 or packing == "float-quantized" or (packing == "naive-quantized" and is_float)):
        raise ConfigError(f"quantization_config.{name}.weights.type: expected the one of {packing}, got {short_repr(weights.get('type'))}.")
    fields = ConfigFields(weights, f"quantization_config.{name}.weights.")
    symmetric = fields.flag("symmetric", True)
    if is_float:
        one_of_field(f"{name}.weights.symmetric", symmetric, (True,))
    if is_fp4:
        block: tuple[int | None, int | None] = (
            1,
            one_of_field(f"{name}.weights.group_size", weights.get("group_size"), (_FP4_GROUPS[packing],)),
        )
    else:
        block = _block(name, weights, fields)
    order = one_of_field(f"{name}.weights.actorder", weights.get("actorder"), (None, False, True, "group", "weight", "static", "dynamic"))
    kind = "e2m1" if is_fp4 else "e4m3" if is_float else f"int{bits}"
    has_order = order in (True, "group", "dynamic")
    return Scheme(packing=packing, kind=kind, targets=tuple(targets), block=block, has_zero_points=not symmetric, has_order=has_order)


def _block(name: str, weights: Mapping[str, Any], fields: ConfigFields) -> tuple[int | None, int | None]:
    """Return the rows and columns that share a scale."""
    implied = "group" if (weights.get("group_size") or -1) > 0 else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = one_of_field(f"{name}.weights.strategy", weights.get("strategy") or implied, ("tensor", "channel", "group", "block"))
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, group_size_of(fields)
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2:
        raise ConfigError(
            f"quantization_config.{name}.weights.block_structure: expected two sizes, as [128, 128], got {short_repr(block)}."
        )
    sizes = ConfigFields({"rows": block[0], "columns": block[1]}, f"quantization_config.{name}.weights.block_structure.")
    return sizes.integer("rows"), sizes.integer("columns")


def _shapes_of_scales(scheme: Scheme, shape: tuple[int, int]) -> tuple[Any, ...]:
    """Return the allowed shapes of scales, first the shape of the blocks."""
    rows, columns = scheme.block
    if rows is None:
        return ((1, 1), (1,), ())
    if columns is None:
        return ((shape[0], 1), (shape[0],))
    return ((-(-shape[0] // rows), -(-shape[1] // columns)),)  # the last blocks may be smaller


def _fp4_scales(module: str, scheme: Scheme, arrays: Arrays) -> Scales:
    """Return scales of FP4: powers of two, or e4m3 divided by one float32."""
    stored = arrays["weight_scale"]
    if scheme.packing == "mxfp4-pack-quantized":
        return Scales(stored=stored.view(ml_dtypes.float8_e8m0fnu), block=(1, 32))
    divisor = constant(arrays["weight_global_scale"])
    if not 0 < divisor < np.inf:
        raise ConfigError(f"{module}.weight_global_scale: expected a finite number > 0, got {divisor}.")
    return Scales(stored=stored, block=(1, 16), divisor=divisor)


def _group_index(module: str, arrays: Arrays, group_size: int) -> Any:
    """Return the group of each input; None for contiguous groups, for which -1 is stored too."""
    found = arrays.get("weight_g_idx")
    if found is None or (found == -1).any():
        return None
    last = (found.size - 1) // group_size
    if not 0 <= found.min() <= found.max() <= last:
        raise ConfigError(f"{module}.weight_g_idx: expected groups from 0 to {last}, got {found.min()} to {found.max()}.")
    return None if np.array_equal(found, np.arange(found.size) // group_size) else found
