"""``QuantizedWeight``: what is stored for a weight, kept packed until its values are asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.codes import Codes
from trt_kvcache.dtypes import numpy_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Scales:
    """What codes are multiplied with: one number for each block."""

    stored: npt.NDArray[Any]
    block: tuple[int, int]
    factor: float = 1.0
    divisor: float = 1.0

    def blocks(self, rows: slice) -> slice:
        """Return the blocks that rows of the weight lie in."""
        return slice(rows.start // self.block[0], -(-rows.stop // self.block[0]))

    def values(self, blocks: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return the scales."""
        scales: npt.NDArray[np.float32] = self.stored[blocks].astype(np.float32)
        if self.divisor != 1:
            scales /= np.float32(self.divisor)
        if self.factor != 1:
            scales *= np.float32(self.factor)
        return scales


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A matrix ``[out, in]``: ``(code - zero point) * scale``, with a scale and a zero point for each block."""

    codes: Codes
    scales: Scales
    zero_points: Codes | None = None
    group_index: npt.NDArray[np.int32] | None = None
    input_factor: npt.NDArray[np.float32] | None = None
    first_row: int = 0
    num_rows: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows = self._rows
        return rows.stop - rows.start, self.codes.shape[1]

    @cached_property
    def permutation(self) -> npt.NDArray[np.int64] | None:
        """Inputs in the order in which those of a group lie beside each other, ``[in]``; None where they do so as stored."""
        return None if self.group_index is None else np.argsort(self.group_index, kind="stable")

    def rows(self, rows: slice) -> QuantizedWeight:
        """Return a part of the weight, over the same memory."""
        start, stop, _ = rows.indices(self.shape[0])
        return replace(self, first_row=self.first_row + start, num_rows=stop - start)

    def dequantized(self, dtype: str = "float32") -> npt.NDArray[Any]:
        """Return the values of the weight."""
        values = self.codes.values(self._rows)
        zero_points = self.zero_points_of_rows()
        if zero_points is not None:
            values -= self._spread(zero_points)
        values *= self._spread(self.scales_of_rows())
        if self.input_factor is not None:
            values *= self.input_factor
        with np.errstate(over="ignore"):
            return values.astype(numpy_dtype(dtype), copy=False)

    def unpacked(self) -> npt.NDArray[Any]:
        """Return the codes, one an element, ``[out, in]``: see :meth:`~trt_kvcache.checkpoint.quantized.codes.Codes.unpacked`."""
        return self.codes.unpacked(self._rows)

    def scales_of_rows(self) -> npt.NDArray[np.float32]:
        """Return the scales of each row, ``[out, blocks of columns]``: see :meth:`Scales.values`."""
        return self._by_row(self.scales.values(self.scales.blocks(self._rows)))

    def stored_scales(self) -> npt.NDArray[Any] | None:
        """Return the scales of the weight as they are stored, one for each block; None where its rows are not whole blocks."""
        height, rows = self.scales.block[0], self._rows
        if rows.start % height or (rows.stop - rows.start) % height:
            return None
        return self.scales.stored[self.scales.blocks(rows)]

    def zero_points_of_rows(self) -> npt.NDArray[np.float32] | None:
        """Return the zero points of each row, ``[out, blocks of columns]``, or None if there are none."""
        return None if self.zero_points is None else self._by_row(self.zero_points.values(self.scales.blocks(self._rows)))

    @property
    def _rows(self) -> slice:
        return slice(self.first_row, self.codes.shape[0] if self.num_rows is None else self.first_row + self.num_rows)

    def _by_row(self, of_blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the numbers of its blocks for each row."""
        height, rows = self.scales.block[0], self._rows
        if height == 1:
            return of_blocks
        first = rows.start - self.scales.blocks(rows).start * height
        return np.repeat(of_blocks, height, axis=0)[first : first + rows.stop - rows.start]

    def _spread(self, of_rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the number of its block for each element."""
        if self.group_index is not None:
            return of_rows[:, self.group_index]
        return np.repeat(of_rows, self.scales.block[1], axis=1)[:, : self.codes.shape[1]]
