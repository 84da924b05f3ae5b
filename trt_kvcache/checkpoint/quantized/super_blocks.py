"""``SuperBlocks``: a matrix in Q4_K, Q5_K or Q6_K of GGUF, in super-blocks of 256 inputs, as llama.cpp writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: Inputs of a super-block.
SUPER_BLOCK = 256

#: Bytes of a super-block of each type.
SUPER_BLOCK_NBYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}

#: Inputs of a scale of each type.
SCALE_INPUTS = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}

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


def factors_of(blocks: Bytes, kind: str) -> npt.NDArray[np.float16]:
    """Return the factor of scales, and that of minimums if there are any, ``[out, super-blocks, 1 or 2]``."""
    place = blocks[:, :, -_FACTOR_BYTES:] if kind == "Q6_K" else blocks[:, :, : 2 * _FACTOR_BYTES]
    return np.ascontiguousarray(place).view("<f2")


def scales_of(blocks: Bytes, kind: str) -> Bytes:
    """Return two bytes for each 32 inputs, ``[out, in / 32, 2]``: a scale and a minimum, or in Q6_K (int8) two scales of 16 inputs."""
    outputs = len(blocks)
    if kind == "Q6_K":
        return np.ascontiguousarray(blocks[:, :, -_FACTOR_BYTES - 16 : -_FACTOR_BYTES]).reshape(outputs, -1, 2)
    stored = blocks[:, :, 2 * _FACTOR_BYTES :][:, :, :_SCALE_BYTES].reshape(outputs, -1, 3, 4)
    scales, minimums, rest = (stored[:, :, index] for index in range(3))
    # The first four have 6 bits in their byte; of the last four, 4 bits are in `rest`, and 2 above those 6.
    last_scales, last_minimums = rest & 15 | scales >> 6 << 4, rest >> 4 | minimums >> 6 << 4
    both = np.stack([np.concatenate([scales & 63, last_scales], axis=-1), np.concatenate([minimums & 63, last_minimums], axis=-1)], axis=-1)
    return both.reshape(outputs, -1, 2)


def values_of(blocks: Bytes, kind: str) -> Bytes:
    """Return the quantized values ``[out, in]``, 0 to 15, 31 or 63."""
    outputs, count, _ = blocks.shape
    if kind == "Q6_K":
        low = _in_order(blocks[:, :, :128].reshape(outputs, count, 2, 1, 64), 4)
        high = _in_order(blocks[:, :, 128:192].reshape(outputs, count, 2, 1, 32), 2)
    else:
        first = 2 * _FACTOR_BYTES + _SCALE_BYTES
        low = _in_order(blocks[:, :, -128:].reshape(outputs, count, 4, 1, 32), 4)
        if kind == "Q4_K":
            return low.reshape(outputs, -1)
        high = _in_order(blocks[:, :, first : first + 32].reshape(outputs, count, 1, 1, 32), 1)
    values: Bytes = low.reshape(outputs, -1) | high.reshape(outputs, -1) << np.uint8(4)
    return values


def _in_order(stored: Bytes, bits: int) -> Bytes:
    """Return the parts of bytes ``[..., 1, n]`` as ``[..., 8 / bits, n]``, the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    found: Bytes = stored >> shifts & np.uint8((1 << bits) - 1)
    return found
