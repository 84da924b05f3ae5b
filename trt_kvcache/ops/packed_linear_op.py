"""A product with a packed matrix as a custom operation.

Inputs: rows ``[B, s, in]`` in float16 or bfloat16, and the bytes of the matrix ``[outputs, in]`` as int32: see ``PackedFormat``. Output:
``[B, s, outputs]``. A matrix in NVFP4 also has its factor as the attributes ``factor_high`` and ``factor_low``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError, ShapeError
from trt_kvcache.kernels.expert_tile_kernels import packed_tiles_kernel
from trt_kvcache.kernels.linear_kernels import MAX_LINEAR_ROWS
from trt_kvcache.kernels.nvfp4_scales import nvfp4_kernel_factor
from trt_kvcache.kernels.packed_linear_kernels import packed_linear_kernel
from trt_kvcache.kernels.packed_tensors import PackedTensors
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.custom_op import TensorType
from trt_kvcache.ops.packed_format import PackedFormat

#: Prefix of the attributes of the matrix.
WEIGHT = "weight"


class PackedLinearOp:
    """Multiply rows with a packed matrix (implements :class:`~trt_kvcache.ops.custom_op.CustomOp`).

    Padding is computed, too. A step of up to 16 tokens reads the matrix once, a wider one once for each 64 tokens.
    """

    name = "packed_linear"

    def __init__(self, *, outputs: int, factor_high: float = 0.0, factor_low: float = 0.0, **attributes: int | float) -> None:
        self._outputs = int_in_range("packed_linear, outputs", outputs, 1, MAX_DIMENSION, error=ConfigError)
        packed = PackedFormat.from_attributes(attributes, WEIGHT)
        if packed is None or packed.attributes(WEIGHT).keys() != attributes.keys():
            raise ConfigError(
                f"packed_linear: expected outputs and the format of a packed weight, got {', '.join(attributes) or 'no format'}."
            )
        if packed.has_factors is not (factor_high > 0):
            wanted = "a factor above 0 of scales in NVFP4" if packed.has_factors else "no factor of other scales"
            raise ConfigError(f"packed_linear, factor_high: expected {wanted}, got {factor_high:g}.")
        self._packed, self._factor = packed, (float(factor_high), float(factor_low))
        self._kernel_factors: dict[str, tuple[float, float] | None] = {}  # by dtype: finding one takes time
        self.attributes: dict[str, int | float] = {"outputs": outputs, **packed.attributes(WEIGHT)}
        self.attributes |= {"factor_high": self._factor[0], "factor_low": self._factor[1]} if packed.has_factors else {}

    def input_types(self, inputs: int, dtype: str, *, batch: int = -1, tokens: int = -1) -> dict[str, TensorType]:
        """Return the inputs in order, by name."""
        return {"rows": TensorType((batch, tokens, inputs), dtype)} | self._packed.input_types(1, self._outputs, inputs)

    def outputs(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """See :meth:`CustomOp.outputs <trt_kvcache.ops.custom_op.CustomOp.outputs>`."""
        rows = inputs[0]
        if len(rows.shape) != 3:
            raise ShapeError(f"packed_linear: expected rows [B, s, in] first, got {list(rows.shape)}.")
        batch, tokens, width = rows.shape
        expected = self.input_types(width, rows.dtype, batch=batch, tokens=tokens)
        if [*inputs] != [*expected.values()]:
            found, wanted = (", ".join(f"{one.dtype}{list(one.shape)}" for one in types) for types in (inputs, expected.values()))
            raise ShapeError(f"packed_linear: expected inputs {wanted} ({', '.join(expected)}), got {found}.")
        return (TensorType((batch, tokens, self._outputs), rows.dtype),)

    def workspace_nbytes(self, inputs: Sequence[TensorType]) -> int:
        """See :meth:`CustomOp.workspace_nbytes <trt_kvcache.ops.custom_op.CustomOp.workspace_nbytes>`. There is none."""
        return 0

    def enqueue(self, inputs: Sequence[DeviceTensor], outputs: Sequence[DeviceTensor], workspace: DeviceTensor, stream: Any) -> None:
        """See :meth:`CustomOp.enqueue <trt_kvcache.ops.custom_op.CustomOp.enqueue>`. One launch."""
        batch, tokens, width = inputs[0].shape
        count = batch * tokens
        rows, out = inputs[0].reshape(count, width), outputs[0].reshape(count, self._outputs)
        weight = self._packed.tensors(inputs[1:], 1, self._outputs, width)
        if isinstance(weight, PackedTensors) and self._packed.has_factors:  # the kernels of few rows take one factor
            if rows.dtype not in self._kernel_factors:
                self._kernel_factors[rows.dtype] = nvfp4_kernel_factor(self._factor, rows.dtype)
            weight = replace(weight, factor=self._factor, kernel_factor=self._kernel_factors[rows.dtype])
        run = packed_linear_kernel if count <= MAX_LINEAR_ROWS else packed_tiles_kernel
        if count:
            run(rows, weight, None, out, stream)
