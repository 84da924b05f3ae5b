"""``OffsetBlocks``: a matrix in Q4_1, Q5_0 or Q5_1 of GGUF, in blocks of 32 inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.bit_planes import BitPlane, read_planes
from trt_kvcache.checkpoint.quantized.gguf import BlockValues
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight, Scales

#: Inputs of a block.
BLOCK = 32

#: Places of the values in a block of each type. The block begins with a scale, and a minimum if there is one: see :data:`MIDDLES`.
PLANES = {
    "Q4_1": (BitPlane(4, 16, parts=1, bits=4),),
    "Q5_0": (BitPlane(6, 16, parts=1, bits=4), BitPlane(2, 4, parts=4, bits=1, first_bit=4)),
    "Q5_1": (BitPlane(8, 16, parts=1, bits=4), BitPlane(4, 4, parts=4, bits=1, first_bit=4)),
}

#: Subtracted from values of types without a minimum.
MIDDLES = {"Q5_0": 16}

_FLOAT_BYTES = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class OffsetBlocks:
    """A matrix ``[out, in]``: ``(value - middle) * scale``, or ``value * scale + minimum``; the product is exact in float32."""

    kind: str  # a key of PLANES
    stored: npt.NDArray[np.uint8]  # [out, in / 32 * bytes]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        last = PLANES[self.kind][0]
        return len(self.stored), self.stored.shape[1] // (last.first_byte + last.nbytes) * BLOCK

    def blocks(self, rows: slice) -> npt.NDArray[np.uint8]:
        """Return the blocks of some rows, ``[rows, blocks, bytes]``, over the same memory."""
        stored = self.stored[rows]
        return stored.reshape(len(stored), self.shape[1] // BLOCK, -1)

    def as_int8(self) -> QuantizedWeight | None:
        """Return the matrix as 8-bit integers with scales; None for types with minimums, which are no multiples of the scale."""
        if self.kind not in MIDDLES:
            return None
        values = _MiddledValues(stored=self.stored, kind="int8", shape=self.shape)
        scales = values.scale_bytes(values.bytes_of(slice(None))).view(np.float16)[..., 0]
        return QuantizedWeight(quantized_values=values, scales=Scales(stored=scales, block=(1, BLOCK)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _MiddledValues(BlockValues):
    """The values of Q5_0, less their middle."""

    def separated(self, stored: Any, rows: slice, empty: Callable[[tuple[int, ...]], Any]) -> Any:
        """Return one value an element: see :class:`QuantizedValues`."""
        values = empty((*stored.shape[:2], BLOCK))
        read_planes(stored, PLANES["Q5_0"], values)
        values -= MIDDLES["Q5_0"]
        return values.reshape(len(stored), -1)


def read_offset_values(blocks: Any, kind: str, values: Any) -> None:
    """Write the quantized values to ``values [out, in]``: arrays of NumPy, or tensors of torch, of uint8."""
    read_planes(blocks, PLANES[kind], values.reshape(*blocks.shape[:2], BLOCK))


def offset_floats(blocks: Any, kind: str) -> Any:
    """Return the bytes of the scales, and of the minimums if there are any, ``[out, blocks, 2 or 4]``, float16."""
    return blocks[..., : _FLOAT_BYTES if kind in MIDDLES else 2 * _FLOAT_BYTES]
