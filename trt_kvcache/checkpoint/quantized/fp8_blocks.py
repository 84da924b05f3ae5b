"""FP8 in blocks of rows and columns, as DeepSeek and Qwen publish it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache._util.shown import shown
from trt_kvcache.checkpoint.quantized.codes import Codes
from trt_kvcache.checkpoint.quantized.format import FLOATS, Arrays, QuantizedFormat, StoredPart, one_of_field
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION

#: What is said of formats that quantize activations too.
WEIGHT_ONLY = "activations are not quantized, only weights are"


class FP8Blocks(QuantizedFormat):
    """``weight`` e4m3 ``[out, in]``, ``weight_scale_inv`` ``[blocks of out, blocks of in]``, which weights are multiplied with.

    Parameters
    ----------
    config : mapping of str to object
        ``quantization_config``.

    Raises
    ------
    ConfigError
        It describes what is not read. The message names the field.
    """

    name = "FP8 in blocks"
    kinds = ("e4m3",)
    ignored = (".input_scale", ".activation_scale")
    notes = (WEIGHT_ONLY,)

    def __init__(self, config: Mapping[str, Any]) -> None:
        one_of_field("fmt", config.get("fmt", "e4m3"), ("e4m3",))
        one_of_field("activation_scheme", config.get("activation_scheme", "dynamic"), ("dynamic", "static"))
        block = config.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2:
            raise ConfigError(f"quantization_config.weight_block_size: expected two sizes, as [128, 128], got {shown(block)}.")
        rows, columns = (
            int_in_range(f"quantization_config.weight_block_size[{index}]", size, 1, MAX_DIMENSION, error=ConfigError)
            for index, size in enumerate(block)
        )
        self.block = (rows, columns)
        self.title = f"FP8 (e4m3) in blocks of {rows} x {columns}"

    def main_part(self, module: str) -> str:
        """Return ``"weight"``."""
        return "weight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        blocks = (-(-shape[0] // self.block[0]), -(-shape[1] // self.block[1]))
        return {"weight": StoredPart((shape,), ("F8_E4M3",)), "weight_scale_inv": StoredPart((blocks,), FLOATS)}

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        codes = Codes(stored=arrays["weight"], kind="e4m3", shape=shape)
        return QuantizedWeight(codes=codes, scales=Scales(stored=arrays["weight_scale_inv"], block=self.block))

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "fp8", "block": self.block}
