"""Places of packed weights in memory, as ``plugins/linear/packed_values.cuh`` reads them.

A fragment has 16 outputs and 64 inputs, in 512 bytes with 4 bits a value and 1024 with 8; the fragments of 16 outputs are contiguous.
With 4 bits a lane has 16 bytes of a fragment, with 8 bits 16 bytes for each half of the inputs. Lane ``4g + t`` has outputs g and
g + 8, and of each half the inputs ``8t`` to ``8t + 7``. Scales and zero points are ``[tiles of 16 outputs, groups, g, 2]``: of outputs g
and g + 8. If the values are ``e4m3`` and the outputs of each tile share their scales, the scales are ``[tiles, groups, 1, 2]``, where the
last dimension has the same scale twice. Padding is zeros.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.linear_tiles import PACKED_BITS

Array = npt.NDArray[Any]

#: Outputs and inputs of a fragment, and inputs of half of one.
FRAGMENT_OUTPUTS, FRAGMENT_INPUTS, HALF_INPUTS = 16, 64, 32

#: ``group_shift`` of one group for all inputs, and of groups of 16, those of NVFP4. Others have ``32 << group_shift`` inputs.
ONE_GROUP, NVFP4_GROUPS = 30, -1

#: The zero point of weights that have none: int4 is stored as 0 to 15.
MIDDLES = {"int4": 8, "int8": 0, "e2m1": 0, "e4m3": 0}

#: By kind of quantized value of a checkpoint: kind, and what is added to values and zero points.
PACKED_KINDS = {
    **{"int4": ("int4", 8), "uint4": ("int4", 0), "int8": ("int8", 0), "uint8": ("int8", -128)},
    **{"e2m1": ("e2m1", 0), "e4m3": ("e4m3", 0)},
}

#: Least and largest value of a kind.
VALUE_RANGES = {"int4": (0, 15), "int8": (-128, 127), "e2m1": (-6, 6), "e4m3": (-448, 448)}

#: Bytes of a fragment.
FRAGMENT_NBYTES = {kind: FRAGMENT_OUTPUTS * FRAGMENT_INPUTS * PACKED_BITS[kind] // 8 for kind in MIDDLES}

#: Dimensions of the bytes of a fragment. Of 4 bits: g, t, row, half, the odd or even inputs, two bytes; each has two nibbles, a last
#: dimension. Of 8 bits: half, g, t, row, input. After tiles and fragments before them, their order in ``[tiles, row, g, fragments, half, t,
#: inputs]``.
STORED_SHAPES: dict[str, tuple[int, ...]] = {"int4": (8, 4, 2, 2, 2, 2), "int8": (2, 8, 4, 2, 8)}
TO_ROWS: dict[str, tuple[int, ...]] = {"int4": (0, 4, 2, 1, 5, 3, 7, 8, 6), "int8": (0, 5, 3, 1, 2, 4, 6)}
for _kind, _like in (("e2m1", "int4"), ("e4m3", "int8")):
    STORED_SHAPES[_kind], TO_ROWS[_kind] = STORED_SHAPES[_like], TO_ROWS[_like]

_VALUE_DTYPES: dict[str, Any] = {"int4": np.uint8, "int8": np.int8, "e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn}


def count_tiles(outputs: int) -> int:
    """Return the tiles of 16 outputs."""
    return -(-outputs // FRAGMENT_OUTPUTS)


def count_groups(inputs: int, group_shift: int) -> int:
    """Return the groups of an output, those of padding included."""
    quarters = 4 * -(-inputs // FRAGMENT_INPUTS)
    return -(-quarters >> (group_shift + 1))


def shift_of_groups(width: int, groups: int) -> int | None:
    """Return the group shift of ``groups`` groups of ``width`` inputs, or None if the kernels do not know it."""
    if groups == 1:
        return ONE_GROUP
    halves, rest = divmod(width, HALF_INPUTS)
    return None if rest or halves & (halves - 1) else halves.bit_length() - 1


def groups_of(inputs: int, group_shift: int) -> Array:
    """Return the group of each input."""
    return np.arange(inputs) * 2 // HALF_INPUTS >> (group_shift + 1)


def unpack_values(packed: Array, kind: str, shape: tuple[int, int]) -> Array:
    """Return the quantized values ``[outputs, inputs]`` of packed bytes, as uint8, int8, e2m1 or e4m3."""
    stored = packed.reshape(len(packed), packed.shape[1] // FRAGMENT_NBYTES[kind], *STORED_SHAPES[kind])
    if PACKED_BITS[kind] == 4:
        stored = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    whole = stored.transpose(TO_ROWS[kind]).reshape(len(packed) * FRAGMENT_OUTPUTS, -1)
    values: Array = whole[: shape[0], : shape[1]].view(_VALUE_DTYPES[kind])
    return values


def unpack_rows(packed: Array, outputs: int) -> Array:
    """Return scales or zero points ``[outputs, groups]`` of tiles."""
    whole = np.broadcast_to(packed, (*packed.shape[:2], FRAGMENT_OUTPUTS // 2, 2))
    rows: Array = whole.transpose(0, 3, 2, 1).reshape(len(packed) * FRAGMENT_OUTPUTS, packed.shape[1])[:outputs]
    return rows
