"""AWQ: int4 with zero points, in groups of inputs, as AutoAWQ writes them for its GEMM kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache.checkpoint.quantized.format import FLOATS, Arrays, QuantizedFormat, StoredPart, divided, groups_of, one_of_field
from trt_kvcache.checkpoint.quantized.group_size import group_size_of
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales
from trt_kvcache.model.config_fields import ConfigFields

#: Place in an int32 of each of eight neighbouring outputs.
NIBBLE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(QuantizedFormat):
    """``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``, ``scales`` ``[groups, out]``."""

    name = "AWQ"
    kinds = ("uint4",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        fields = ConfigFields(config, "quantization_config.")
        one_of_field("bits", config.get("bits", config.get("w_bit")), (4,))
        one_of_field("version", str(config.get("version") or "gemm").lower(), ("gemm",))
        one_of_field("zero_point", fields.flag("zero_point", True), (True,))
        self.group_size = group_size_of(ConfigFields({"group_size": config.get("q_group_size"), **config}))
        groups = "one group" if self.group_size is None else f"groups of {self.group_size}"
        self.title = f"AWQ int4 in {groups}"

    def main_part(self, module: str) -> str:
        """Return ``"qweight"``."""
        return "qweight"

    def parts(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredPart]:
        """Return the tensors of a weight: see :class:`QuantizedFormat`."""
        outputs, inputs = shape
        groups = groups_of(module, inputs, self.group_size or inputs)
        columns = divided(module, "outputs", outputs, len(NIBBLE_ORDER))
        return {
            "qweight": StoredPart(((inputs, columns),), ("I32",)),
            "qzeros": StoredPart(((groups, columns),), ("I32",)),
            "scales": StoredPart(((groups, outputs),), FLOATS),
        }

    def weight(self, module: str, arrays: Arrays, shape: tuple[int, int]) -> QuantizedWeight:
        """Return a weight over its tensors: see :class:`QuantizedFormat`."""
        group_size = self.group_size or shape[1]

        def values(stored: Any, columns: int) -> QuantizedValues:
            return QuantizedValues(
                stored=stored, kind="uint4", shape=(shape[0], columns), is_transposed=True, packed_axis="rows", order=NIBBLE_ORDER
            )

        return QuantizedWeight(
            quantized_values=values(arrays["qweight"], shape[1]),
            scales=Scales(stored=arrays["scales"].T, block=(1, group_size)),
            zero_points=values(arrays["qzeros"], shape[1] // group_size),
        )

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how the tensors are read."""
        return {"format": "awq", "group_size": self.group_size}
