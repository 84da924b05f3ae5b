"""Places of weights in super-blocks (Q4_K, Q5_K, Q6_K) in memory, as ``plugins/linear/super_block_values.cuh`` reads them.

Fragments, lanes and the four lowest bits of values are stored as for int4 in ``packed_layout.py``. After these 512 bytes, a fragment has
the high bits of its values, in ``high_bits`` words of 32 bits for each lane (Q4_K 0, Q5_K 1, Q6_K 2). In row ``g + 8i`` (i = 0, 1) a lane
has 8 inputs of each ``half`` (0 or 1) of the fragment; of these 8, inputs ``2k`` and ``2k + 1`` (k = 0 to 3) are a pair. With ``n =
high_bits * (4 * (2i + half) + k)``, word ``n // 16`` has the bits of the even input from bit ``n % 16`` on, and those of the odd input from
bit ``n % 16 + 16`` on.

A fragment has 8 bytes of scales for each g: for each half two bytes for row g, then two for row g + 8. Factors are
``[tiles, super-blocks, g, 2 rows, factors]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_INPUTS,
    FRAGMENT_NBYTES,
    FRAGMENT_OUTPUTS,
    unpack_rows,
    unpack_values,
)

Array = npt.NDArray[Any]

#: Inputs of a super-block.
SUPER_BLOCK = 256

#: Kinds, and the bits of a value beyond the lowest four.
HIGH_BITS = {"q4_k": 0, "q5_k": 1, "q6_k": 2}

#: Inputs of a scale, and what is subtracted from a value.
SCALE_INPUTS = {"q4_k": 32, "q5_k": 32, "q6_k": 16}
MIDDLES = {"q4_k": 0, "q5_k": 0, "q6_k": 32}

#: Factors of a super-block of a row: of scales, and of minimums.
FACTORS = {"q4_k": 2, "q5_k": 2, "q6_k": 1}

#: Largest products of a scale and a value, by which factors are multiplied.
LARGEST = {"q4_k": (63 * 15, 63), "q5_k": (63 * 31, 63), "q6_k": (128 * 32,)}

#: Bytes of the lowest four bits of a fragment, and of a word of all lanes.
LOW_NBYTES, _WORD_NBYTES = FRAGMENT_NBYTES["int4"], 128


def fragment_nbytes(kind: str) -> int:
    """Return the bytes of a fragment."""
    return LOW_NBYTES + _WORD_NBYTES * HIGH_BITS[kind]


def unpack_super_blocks(packed: Array, kind: str, shape: tuple[int, int]) -> Array:
    """Return the quantized values ``[outputs, inputs]`` of packed bytes."""
    bits, tiles, fragments = HIGH_BITS[kind], len(packed), shape[1] // FRAGMENT_INPUTS
    stored = packed.reshape(tiles, fragments, -1)
    low = np.ascontiguousarray(stored[:, :, :LOW_NBYTES]).reshape(tiles, -1)
    values: Array = unpack_values(low, "int4", shape)
    if not bits:
        return values
    words = np.ascontiguousarray(stored[:, :, LOW_NBYTES:]).view("<u4").reshape(tiles, fragments, 8, 4, bits)
    word, shift = high_bit_places(bits)
    high = (words[..., word] >> shift.astype(np.uint32)).astype(np.uint8) & np.uint8((1 << bits) - 1)
    whole = high.transpose(HIGH_TO_ROWS).reshape(tiles * FRAGMENT_OUTPUTS, -1)[: shape[0]]
    found: Array = values | whole << np.uint8(4)
    return found


#: Dimensions of other bits after tiles and fragments: g, t, row, half, pair, odd; their order in rows.
HIGH_TO_ROWS = (0, 4, 2, 1, 5, 3, 6, 7)


def high_bit_places(bits: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the word of the other bits of each value of a lane, and the first of them there, ``[row, half, pair, odd]``."""
    first = bits * np.arange(16).reshape(2, 2, 4, 1)
    word, shift = np.broadcast_arrays(first // 16, first % 16 + 16 * np.arange(2))
    return word, shift


def unpack_scales(packed: Array, outputs: int) -> npt.NDArray[np.uint8]:
    """Return the bytes ``[outputs, inputs / 32, 2]`` of packed scales."""
    of_rows = packed.reshape(*packed.shape[:3], 2, 2, 2).transpose(0, 4, 2, 1, 3, 5)
    found: npt.NDArray[np.uint8] = of_rows.reshape(len(packed) * FRAGMENT_OUTPUTS, -1, 2)[:outputs]
    return found


def dequantized_super_blocks(values: Array, scales: Array, factors: Array, kind: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return the weights of packed arrays in float32."""
    exact: npt.NDArray[np.float32] = unpack_super_blocks(values, kind, shape).astype(np.float32) - np.float32(MIDDLES[kind])
    of_halves = unpack_scales(scales, shape[0])
    of_blocks = [unpack_rows(factors[..., index], shape[0]).astype(np.float32) for index in range(FACTORS[kind])]
    group = np.arange(shape[1]) // SCALE_INPUTS[kind]
    block = np.arange(shape[1] // SCALE_INPUTS[kind]) // (SUPER_BLOCK // SCALE_INPUTS[kind])
    if FACTORS[kind] == 1:
        of_groups = of_halves.view(np.int8).reshape(shape[0], -1).astype(np.float32) * of_blocks[0][:, block]
        exact *= of_groups[:, group]
        return exact
    scale, minimum = (of_halves[..., index].astype(np.float32) * of_blocks[index][:, block] for index in range(2))
    exact *= scale[:, group]
    exact -= minimum[:, group]
    return exact
