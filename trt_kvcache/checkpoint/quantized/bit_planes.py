"""Places of quantized values in the blocks of GGUF: one description, which NumPy reads on the host and torch on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BitPlane:
    """Some bits of each value of a block: in ``parts`` of bytes, whose lowest bits belong to the first values of the part."""

    first_byte: int
    nbytes: int
    parts: int
    bits: int
    first_bit: int = 0  # of the value


def read_planes(blocks: Any, planes: Sequence[BitPlane], values: Any) -> None:
    """Write the values of blocks ``[..., bytes]`` to ``values [..., values of a block]``: uint8 arrays of NumPy or torch."""
    for plane in planes:
        stored = blocks[..., plane.first_byte : plane.first_byte + plane.nbytes].reshape(*blocks.shape[:-1], plane.parts, -1)
        fields = values.reshape(*blocks.shape[:-1], plane.parts, 8 // plane.bits, -1)
        for index in range(8 // plane.bits):
            field, of_values = stored >> plane.bits * index & (1 << plane.bits) - 1, fields[..., index, :]
            if plane.first_bit:
                of_values |= field << plane.first_bit
            else:
                of_values[:] = field
