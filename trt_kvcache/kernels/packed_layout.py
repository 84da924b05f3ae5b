"""Places of packed weights in memory, as ``plugins/linear/packed_values.cuh`` reads them.

A fragment has 16 outputs and 64 inputs, ``int4`` and ``e2m1`` in 512 bytes, ``int8`` in 1024; the fragments of 16 outputs are contiguous.
A lane has 16 bytes of a fragment, in ``int8`` 16 for each half of the inputs: lane ``4g + t`` has outputs g and g + 8, and of each half the
inputs ``8t`` to ``8t + 7``. Scales and zero points are ``[tiles of 16 outputs, groups, g, 2]``: of outputs g and g + 8. Padding is zeros.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Outputs and inputs of a fragment, and inputs of half of one.
FRAGMENT_OUTPUTS, FRAGMENT_INPUTS, HALF_INPUTS = 16, 64, 32

#: ``group_shift`` of one group for all inputs. Others have ``32 << group_shift`` inputs.
ONE_GROUP = 30

#: The zero point of weights that have none: int4 is stored as 0 to 15.
MIDDLES = {"int4": 8, "int8": 0, "e2m1": 0}

#: Bytes of a fragment.
FRAGMENT_NBYTES = {"int4": 512, "int8": 1024, "e2m1": 512}

#: Dimensions of the bytes of a fragment. Of 4 bits: g, t, row, half, the odd or even inputs, two bytes; each has two nibbles, a last
#: dimension. int8: half, g, t, row, input. After tiles and fragments before them, their order in ``[tiles, row, g, fragments, half, t,
#: inputs]``.
STORED_SHAPES: dict[str, tuple[int, ...]] = {"int4": (8, 4, 2, 2, 2, 2), "int8": (2, 8, 4, 2, 8)}
TO_ROWS: dict[str, tuple[int, ...]] = {"int4": (0, 4, 2, 1, 5, 3, 7, 8, 6), "int8": (0, 5, 3, 1, 2, 4, 6)}
STORED_SHAPES["e2m1"], TO_ROWS["e2m1"] = STORED_SHAPES["int4"], TO_ROWS["int4"]

_VALUE_DTYPES: dict[str, Any] = {"int4": np.uint8, "int8": np.int8, "e2m1": ml_dtypes.float4_e2m1fn}


def count_tiles(outputs: int) -> int:
    """Return the tiles of 16 outputs."""
    return -(-outputs // FRAGMENT_OUTPUTS)


def count_groups(inputs: int, group_shift: int) -> int:
    """Return the groups of an output, those of padding included."""
    halves = 2 * -(-inputs // FRAGMENT_INPUTS)
    return -(-halves >> group_shift)


def unpack_values(packed: Array, kind: str, shape: tuple[int, int]) -> Array:
    """Return the quantized values ``[outputs, inputs]`` of packed bytes, as uint8, int8 or e2m1."""
    stored = packed.reshape(len(packed), packed.shape[1] // FRAGMENT_NBYTES[kind], *STORED_SHAPES[kind])
    if kind != "int8":
        stored = np.stack([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1)
    whole = stored.transpose(TO_ROWS[kind]).reshape(len(packed) * FRAGMENT_OUTPUTS, -1)
    values: Array = whole[: shape[0], : shape[1]].view(_VALUE_DTYPES[kind])
    return values


def unpack_rows(packed: Array, outputs: int) -> Array:
    """Return scales or zero points ``[outputs, groups]`` of tiles."""
    rows: Array = packed.transpose(0, 3, 2, 1).reshape(len(packed) * FRAGMENT_OUTPUTS, packed.shape[1])[:outputs]
    return rows
