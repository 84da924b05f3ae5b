"""``QuantizedValues``: packed quantized values (integers or small floats) as a library stores them."""

from __future__ import annotations

from collections.abc import Callable
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
        stored = self.bytes_of(rows)
        if self.kind == "e4m3":
            return (stored[..., 0].T if self.is_transposed else stored[..., 0]).view(ml_dtypes.float8_e4m3fn)
        values: npt.NDArray[np.uint8] = self.separated(stored, rows, lambda shape: np.empty(shape, np.uint8))
        return values.view(np.int8) if self.kind in ("int4", "int8") else values

    def bytes_of(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Return the bytes of the stored elements that contain rows, ``[..., ..., bytes of an element]``, over the same memory."""
        start, stop, _ = rows.indices(self.shape[0])
        elements = slice(start // self._rows_together, -(-stop // self._rows_together))
        stored = self.stored[:, elements] if self.is_transposed else self.stored[elements]
        return stored.view(np.uint8).reshape(*stored.shape, self.stored.dtype.itemsize)

    def separated(self, stored: Any, rows: slice, empty: Callable[[tuple[int, ...]], Any]) -> Any:
        """Return the values ``[rows, columns]`` of :meth:`bytes_of` modulo 256.

        All are arrays of NumPy, or tensors of torch, of uint8, as ``empty(shape)`` makes them.
        """
        first, second, nbytes = stored.shape
        bits = VALUE_BITS[self.kind]
        mask, together = (1 << bits) - 1, 8 * nbytes // bits
        by_first = (self.packed_axis == "rows") ^ self.is_transposed
        values = empty((first, together, second) if by_first else (first, second, together))
        of_places = values.swapaxes(1, 2) if by_first else values
        for index, place in enumerate(self.order or range(together)):
            byte, shift = divmod(place * bits, 8)
            of_places[..., index] = stored[..., byte] >> shift & mask
        if self.added:
            values += self.added
            values &= mask
        if self.kind == "int4":  # its sign is that of the highest of 4 bits
            values ^= 8
            values -= 8
        values = values.reshape(first * together, second) if by_first else values.reshape(first, second * together)
        start, stop, _ = rows.indices(self.shape[0])
        skipped = start % self._rows_together
        return (values.T if self.is_transposed else values)[skipped : skipped + stop - start, : self.shape[1]]

    @property
    def _rows_together(self) -> int:
        """Rows of an element."""
        return self.stored.dtype.itemsize * 8 // VALUE_BITS[self.kind] if self.packed_axis == "rows" else 1

    def as_float32(self, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
        """Return rows as float32 ``[rows, columns]`` before scaling, in new memory."""
        values = self.unpacked(rows)
        return E2M1_VALUES[values] if self.kind == "e2m1" else values.astype(np.float32, order="C")
