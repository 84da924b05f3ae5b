"""FP8 in blocks of rows and columns, as DeepSeek and Qwen publish it, or with one scale a matrix, as AutoFP8 writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.quantized.format import FLOATS, Arrays, QuantizedFormat, StoredPart, one_of_field
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION

#: Note on formats that quantize activations too.
WEIGHT_ONLY = "activations are not quantized, only weights are"


class FP8Blocks(QuantizedFormat):
    """``weight`` e4m3 ``[out, in]``, ``weight_scale_inv`` ``[blocks of out, blocks of in]``, which weights are multiplied with."""

    name = "FP8"
    kinds = ("e4m3",)
    ignored = (".input_scale", ".activation_scale", ".kv_scale", ".k_scale", ".v_scale")
    notes: tuple[str, ...] = (WEIGHT_ONLY,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        one_of_field("fmt", config.get("fmt", "e4m3"), ("e4m3",))
        one_of_field("activation_scheme", config.get("activation_scheme", "dynamic"), ("dynamic", "static"))
        if config.get("kv_cache_scheme"):
            self.notes = (*self.notes, "scales of K and V are not read")
        self.block = _block(config.get("weight_block_size"))
        self.title = "FP8 (e4m3), one scale a matrix" if self.block is None else "FP8 (e4m3) in blocks of {} x {}".format(*self.block)

    def main_part(self, module: str) -> str:
        """Return ``"weight"``."""
        return "weight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        values = StoredPart((shape,), ("F8_E4M3",))
        if self.block is None:
            return {"weight": values, "weight_scale_inv": StoredPart(((), (1,)), FLOATS, other_name="weight_scale")}
        blocks = (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))
        return {"weight": values, "weight_scale_inv": StoredPart((blocks,), FLOATS)}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        values = QuantizedValues(stored=arrays["weight"], kind="e4m3", shape=shape)
        scales = arrays["weight_scale_inv"]
        if self.block is None:
            return QuantizedWeight(quantized_values=values, scales=Scales(stored=scales.reshape(1, 1), block=shape))
        return QuantizedWeight(quantized_values=values, scales=Scales(stored=scales, block=self.block))

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "fp8", "block": self.block}


def _block(block: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None for one scale per matrix."""
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2:
        raise ConfigError(f"quantization_config.weight_block_size: expected two sizes, as [128, 128], got {short_repr(block)}.")
    rows, columns = (
        int_in_range(f"quantization_config.weight_block_size[{index}]", size, 1, MAX_DIMENSION, error=ConfigError)
        for index, size in enumerate(block)
    )
    return rows, columns
