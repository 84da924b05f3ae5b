"""``SuperBlocks``: a matrix in Q4_K, Q5_K or Q6_K of GGUF, in super-blocks of 256 inputs, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.quantized.bit_planes import BitPlane, read_planes

#: Inputs of a super-block.
SUPER_BLOCK = 256

#: Bytes of a super-block of each type.
SUPER_BLOCK_NBYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}

#: Inputs of a scale of each type.
SCALE_INPUTS = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}

#: Places of the values in a super-block of each type.
PLANES = {
    "Q4_K": (BitPlane(16, 128, parts=4, bits=4),),
    "Q5_K": (BitPlane(48, 128, parts=4, bits=4), BitPlane(16, 32, parts=1, bits=1, first_bit=4)),
    "Q6_K": (BitPlane(0, 128, parts=2, bits=4), BitPlane(128, 64, parts=2, bits=2, first_bit=4)),
}

Bytes = npt.NDArray[np.uint8]

_FACTOR_BYTES, _SCALE_BYTES = 2, 12


@dataclass(frozen=True, kw_only=True, eq=False)
class SuperBlocks:
    """A matrix ``[out, in]``: ``value * (factor * scale) - (factor of minimums * minimum)``; Q6_K has no minimums, and values less 32.

    All products are exact in float32, which rounds the difference, as the ``gguf`` package does.
    """

    kind: str  # a key of SUPER_BLOCK_NBYTES
    stored: Bytes  # [out, in / 256 * bytes]
    parts: tuple[slice | tuple[int, ...], ...] = (slice(None),)  # the rows that the matrix is

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return sum(len(self._stored_rows(part)) for part in self.parts), self.stored.shape[1] // SUPER_BLOCK_NBYTES[self.kind] * SUPER_BLOCK

    def of_rows(self, parts: Sequence[slice | list[int]]) -> SuperBlocks:
        """Return some of all rows, over the same memory."""
        return replace(self, parts=tuple(part if isinstance(part, slice) else tuple(part) for part in parts))

    def _stored_rows(self, part: slice | tuple[int, ...]) -> range | tuple[int, ...]:
        return range(*part.indices(len(self.stored))) if isinstance(part, slice) else part

    def blocks(self) -> Bytes:
        """Return the super-blocks ``[out, in / 256, bytes]``, which are copied unless they are all rows."""
        chosen = [self.stored[part if isinstance(part, slice) else list(part)] for part in self.parts]
        whole = chosen[0] if len(chosen) == 1 else np.concatenate(chosen)
        return whole.reshape(len(whole), -1, SUPER_BLOCK_NBYTES[self.kind])


def factors_of(blocks: Any, kind: str) -> Any:
    """Return the bytes of the factor of scales, and of that of minimums if there are any, ``[out, super-blocks, 2 or 4]``, float16."""
    return blocks[:, :, -_FACTOR_BYTES:] if kind == "Q6_K" else blocks[:, :, : 2 * _FACTOR_BYTES]


def read_scales(blocks: Any, kind: str, scales: Any) -> None:
    """Write two bytes for each 32 inputs to ``scales [out, in / 32, 2]``: a scale and a minimum, or in Q6_K (int8) two scales of 16 inputs.

    All are arrays of NumPy, or tensors of torch.
    """
    of_blocks = scales.reshape(*blocks.shape[:2], 8, 2)
    if kind == "Q6_K":
        of_blocks[:] = blocks[:, :, -_FACTOR_BYTES - 16 : -_FACTOR_BYTES].reshape(of_blocks.shape)
        return
    stored = blocks[:, :, 2 * _FACTOR_BYTES :][:, :, :_SCALE_BYTES].reshape(*blocks.shape[:2], 3, 4)
    both, rest = (stored[:, :, 0], stored[:, :, 1]), stored[:, :, 2]
    for index, first in enumerate(both):
        # The first four have 6 bits in their byte; of the last four, 4 bits are in `rest`, and 2 above those 6.
        of_blocks[:, :, :4, index] = first & 63
        of_blocks[:, :, 4:, index] = rest >> 4 * index & 15 | first >> 6 << 4


def read_values(blocks: Any, kind: str, values: Any) -> None:
    """Write the quantized values, 0 to 15, 31 or 63, to ``values [out, in]``: arrays of NumPy, or tensors of torch, of uint8."""
    read_planes(blocks, PLANES[kind], values.reshape(*blocks.shape[:2], SUPER_BLOCK))
