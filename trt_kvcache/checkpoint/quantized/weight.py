"""``QuantizedWeight``: a quantized weight, kept packed until its values are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.quantized.quantized_values import QuantizedValues
from trt_kvcache.dtypes import numpy_dtype

#: Values that a thread dequantizes at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """Scales of quantized values: one for each block."""

    stored: npt.NDArray[Any]  # [blocks of rows, blocks of columns], float16, bfloat16, float32, e4m3 or e8m0
    block: tuple[int, int]  # rows and columns of a block; the last blocks may be smaller
    factor: float = 1.0  # a float32 that multiplies each scale
    divisor: float = 1.0  # a float32 that divides each scale first

    def blocks(self, rows: slice) -> slice:
        """Return the blocks of rows that contain ``rows`` of the weight."""
        return slice(rows.start // self.block[0], -(-rows.stop // self.block[0]))

    def values(self, blocks: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return float32 scales ``[blocks of rows, blocks of columns]``, exact except for the rounding of factor and divisor."""
        scales: npt.NDArray[np.float32] = self.stored[blocks].astype(np.float32)
        if self.divisor != 1:
            scales /= np.float32(self.divisor)
        if self.factor != 1:
            scales *= np.float32(self.factor)
        return scales


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A matrix ``[out, in]``: ``(quantized value - zero point) * scale``, with a scale and a zero point for each block.

    Its arrays are views of memory-mapped files; :meth:`dequantized` returns new memory.
    """

    quantized_values: QuantizedValues  # [out, in]
    scales: Scales
    zero_points: QuantizedValues | None = None  # one for each block
    group_index: npt.NDArray[np.int32] | None = None  # [in]: block of columns of each input, if groups are not contiguous (act-order)
    input_factor: npt.NDArray[np.float32] | None = None  # [in]: multiplies each input before the matrix
    first_row: int = 0  # the rows of the stored matrix that this weight is
    num_rows: int | None = None  # all by default
    row_order: npt.NDArray[np.int64] | None = None  # [out]: of these rows, the ones that this weight is; all in their order by default

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        rows = self.stored_rows
        return rows.stop - rows.start if self.row_order is None else len(self.row_order), self.quantized_values.shape[1]

    @cached_property
    def permutation(self) -> npt.NDArray[np.int64] | None:
        """Order of the inputs in which groups are contiguous, ``[in]``; None if they are so as stored."""
        return None if self.group_index is None else np.argsort(self.group_index, kind="stable")

    def rows(self, rows: slice | Sequence[int]) -> QuantizedWeight:
        """Return some outputs (a slice without a step, or indices in any order) over the same memory."""
        if self.row_order is not None or not isinstance(rows, slice):
            order = np.arange(self.shape[0]) if self.row_order is None else self.row_order
            return replace(self, row_order=order[rows])
        start, stop, _ = rows.indices(self.shape[0])
        return replace(self, first_row=self.first_row + start, num_rows=stop - start)

    def dequantized(self, dtype: str = "float32") -> npt.NDArray[Any]:
        """Return the values in new memory, rounded once to ``dtype``: too large ones are infinite.

        float32 is exact, unless scales are float32 or have a factor.
        """
        if self.row_order is not None:
            in_order: npt.NDArray[Any] = replace(self, row_order=None).dequantized(dtype)[self.row_order]
            return in_order
        values = np.empty(self.shape, numpy_dtype(dtype))

        def dequantize(rows: slice) -> None:
            values[rows] = self.rows(rows)._dequantized(values.dtype)

        for_each(dequantize, row_slices(*self.shape, _CHUNK))
        return values

    def _dequantized(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        values = self.quantized_values.as_float32(self.stored_rows)
        zero_points = self.zero_points_of_rows()
        if zero_points is not None:
            self._with_blocks(np.subtract, values, zero_points)
        self._with_blocks(np.multiply, values, self.scales_of_rows())
        if self.input_factor is not None:
            values *= self.input_factor
        with np.errstate(over="ignore"):
            return values.astype(dtype, copy=False)

    def unpacked(self) -> npt.NDArray[Any]:
        """Return the quantized values ``[out, in]``, one an element: int8 or uint8, e4m3 of ml_dtypes, bits of e2m1 as uint8."""
        return self._in_order(self.quantized_values.unpacked(self.stored_rows))

    def scales_of_rows(self) -> npt.NDArray[np.float32]:
        """Return the scales of each row, ``[out, blocks of columns]``: see :meth:`Scales.values`."""
        return self._by_row(self.scales.values(self.scales.blocks(self.stored_rows)))

    def stored_scales(self) -> npt.NDArray[Any] | None:
        """Return the stored scales, one for each block; None if the weight's rows are not whole blocks."""
        height, rows = self.scales.block[0], self.stored_rows
        if rows.start % height or self.shape[0] % height:
            return None
        stored = self.scales.stored[self.scales.blocks(rows)]
        if self.row_order is None:
            return stored
        blocks = (self.row_order // height).reshape(-1, height)
        return stored[blocks[:, 0]] if (blocks == blocks[:, :1]).all() else None

    def zero_points_of_rows(self) -> npt.NDArray[np.float32] | None:
        """Return the zero points of each row, ``[out, blocks of columns]``, or None if there are none."""
        return None if self.zero_points is None else self._by_row(self.zero_points.as_float32(self.scales.blocks(self.stored_rows)))

    @property
    def stored_rows(self) -> slice:
        """The rows of the stored matrix that contain the weight."""
        return slice(self.first_row, self.quantized_values.shape[0] if self.num_rows is None else self.first_row + self.num_rows)

    def _by_row(self, of_blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the values of the blocks for each row."""
        height, rows = self.scales.block[0], self.stored_rows
        if height > 1:
            first = rows.start - self.scales.blocks(rows).start * height
            of_blocks = np.repeat(of_blocks, height, axis=0)[first : first + rows.stop - rows.start]
        return self._in_order(of_blocks)

    def _in_order(self, of_rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values of the stored rows for each row."""
        return of_rows if self.row_order is None else of_rows[self.row_order]

    def _with_blocks(self, operation: np.ufunc, values: npt.NDArray[np.float32], of_blocks: npt.NDArray[np.float32]) -> None:
        """Apply an operation in place to each element and the value of its block."""
        (_, columns), width = values.shape, self.scales.block[1]
        if self.group_index is not None:
            operation(values, of_blocks[:, self.group_index], out=values)
        elif columns % width:
            operation(values, np.repeat(of_blocks, width, axis=1)[:, :columns], out=values)
        else:
            blocks = values.reshape(len(values), -1, width)
            operation(blocks, of_blocks[:, :, None], out=blocks)
