"""MXFP4: FP4 in groups of 32 inputs whose scale is a power of two, as OpenAI publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes

from trt_kvcache.checkpoint.quantized.format import Arrays, QuantizedFormat, StoredPart, groups_of
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales

_GROUP = 32


class MXFP4(QuantizedFormat):
    """``weight_blocks`` uint8 ``[out, in / 32, 16]``, ``weight_scales`` uint8 (e8m0) ``[out, in / 32]``. Linear layers only, no experts."""

    name = "MXFP4"
    kinds = ("e2m1",)
    title = "MXFP4"

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def main_part(self, module: str) -> str:
        """Return ``"weight_blocks"``."""
        return "weight_blocks"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        groups = groups_of(module, shape[1], _GROUP)
        blocks = StoredPart(((shape[0], groups, _GROUP // 2),), ("U8",))
        return {"weight_blocks": blocks, "weight_scales": StoredPart(((shape[0], groups),), ("U8", "F8_E8M0"))}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        values = QuantizedValues(stored=arrays["weight_blocks"].reshape(shape[0], shape[1] // 2), kind="e2m1", shape=shape)
        return QuantizedWeight(
            quantized_values=values, scales=Scales(stored=arrays["weight_scales"].view(ml_dtypes.float8_e8m0fnu), block=(1, _GROUP))
        )
