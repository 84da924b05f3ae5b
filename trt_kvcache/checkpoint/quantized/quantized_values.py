"""``QuantizedValues``: packed quantized values (integers or small floats) as a library stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

#: Bits of each kind of quantized value.
VALUE_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "e4m3": 8, "e2m1": 4}

#: The 16 values of e2m1, by their 4 bits.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
E2M1_VALUES.flags.writeable = False

_UNSIGNED = {1: np.uint8, 4: np.uint32}


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedValues:
    """A matrix of quantized values ``[rows, columns]``, over the memory of a file."""

    stored: npt.NDArray[Any]  # [rows, columns] or transposed, with one value or several in each element
    kind: str  # a key of VALUE_BITS
    shape: tuple[int, int]  # rows and columns
    is_transposed: bool = False  # `stored` is [columns, rows]
    packed_axis: str = "columns"  # the values of an element are neighbours along it
    order: tuple[int, ...] | None = None  # place of each neighbour in its element, from the lowest bits; None: in order
    added: int = 0  # to each stored integer, modulo the range of its bits

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.stored.nbytes

    def unpacked(self, rows: slice = slice(None)) -> npt.NDArray[Any]:
        """Return rows ``[rows, columns]``, one value an element: int8 or uint8; e4m3 of ml_dtypes; bits of e2m1 as uint8."""
        start, stop, _ = rows.indices(self.shape[0])
        bits = VALUE_BITS[self.kind]
        together = self.stored.dtype.itemsize * 8 // bits
        by_rows = together if self.packed_axis == "rows" else 1
        words = slice(start // by_rows, -(-stop // by_rows))
        stored = self.stored[:, words] if self.is_transposed else self.stored[words]
        if self.kind == "e4m3":
            return (stored.T if self.is_transposed else stored).view(ml_dtypes.float8_e4m3fn)
        axis = 0 if (self.packed_axis == "rows") ^ self.is_transposed else 1
        values = self._separate(stored.view(_UNSIGNED[stored.dtype.itemsize]), bits, together, axis)
        values = values.T if self.is_transposed else values
        first = start - words.start * by_rows
        return values[first : first + stop - start, : self.shape[1]]

    def _separate(self, words: npt.NDArray[Any], bits: int, together: int, axis: int) -> npt.NDArray[Any]:
        """Return the values of each word next to each other along ``axis``, as integers of their signedness."""
        places = np.arange(together) if self.order is None else np.array(self.order)
        shifts = (places * bits).astype(words.dtype)
        spread = (words[:, None, :] >> shifts[:, None]) if axis == 0 else (words[:, :, None] >> shifts)
        shape = (words.shape[0] * together, words.shape[1]) if axis == 0 else (words.shape[0], words.shape[1] * together)
        mask = (1 << bits) - 1
        values: npt.NDArray[Any] = (spread.astype(np.uint8).reshape(shape) + np.uint8(self.added)) & np.uint8(mask)
        if self.kind in ("int4", "int8"):
            sign = np.uint8(1 << (bits - 1))
            values = ((values ^ sign) - sign).view(np.int8)
        return values

    def as_float32(self, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return rows as float32 ``[rows, columns]`` before scaling, in new memory."""
        values = self.unpacked(rows)
        return E2M1_VALUES[values] if self.kind == "e2m1" else values.astype(np.float32, order="C")
