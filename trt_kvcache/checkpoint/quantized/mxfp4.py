"""MXFP4: FP4 in groups of 32 inputs whose scale is a power of two, as OpenAI publishes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.format import Arrays, QuantizedFormat, StoredPart, checked_expression, groups_of
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError

_GROUP = 32


class MXFP4(QuantizedFormat):
    """``weight_blocks`` uint8 ``[out, in / 32, 16]``, ``weight_scales`` uint8 (e8m0) ``[out, in / 32]``."""

    name = "MXFP4"
    kinds = ("e2m1",)
    title = "MXFP4"

    def __init__(self, config: Mapping[str, Any]) -> None:
        kept = config.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise ConfigError(f"quantization_config.modules_to_not_convert: expected a list of names, got {short_repr(kept)}.")
        self._kept = [checked_expression("quantization_config.modules_to_not_convert", name) for name in kept]

    def main_part(self, module: str) -> str:
        """Return ``"weight_blocks"``."""
        return "weight_blocks"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        kept = next((name for name in self._kept if re.match(name, module)), None)
        if kept is not None:
            raise ConfigError(f"quantization_config.modules_to_not_convert: expected no packed {module} with {short_repr(kept)}, got one.")
        groups = groups_of(module, shape[1], _GROUP)
        blocks = StoredPart(((shape[0], groups, _GROUP // 2),), ("U8",))
        return {"weight_blocks": blocks, "weight_scales": StoredPart(((shape[0], groups),), ("U8", "F8_E8M0"))}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        values = QuantizedValues(stored=arrays["weight_blocks"].reshape(shape[0], shape[1] // 2), kind="e2m1", shape=shape)
        return QuantizedWeight(
            quantized_values=values, scales=Scales(stored=arrays["weight_scales"].view(ml_dtypes.float8_e8m0fnu), block=(1, _GROUP))
        )
