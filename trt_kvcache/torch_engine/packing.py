"""Quantized weights of any format of a checkpoint in the layout of the packed kernels, if these know the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_INPUTS,
    FRAGMENT_NBYTES,
    FRAGMENT_OUTPUTS,
    HALF_INPUTS,
    MIDDLES,
    ONE_GROUP,
    count_groups,
    count_tiles,
    pack_rows,
    pack_values,
)
from trt_kvcache.kernels.source_variants import SCALE_DTYPES

#: By kind of quantized value: packed kind, and what is added to values and zero points.
_KINDS = {"int4": ("int4", 8), "uint4": ("int4", 0), "int8": ("int8", 0), "uint8": ("int8", -128), "e2m1": ("e2m1", 0)}

_RANGES = {"int4": (0, 15), "int8": (-128, 127), "e2m1": (-6, 6)}
_DTYPES: dict[str, Any] = {"int4": np.uint8, "int8": np.int8, "e2m1": np.uint8}

#: Values that are unpacked at a time: few enough for the cache of a CPU core.
_CHUNK = 1 << 18

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PackedArrays:
    """A packed matrix in host memory, with the fields of ``PackedTensors``."""

    kind: str
    outputs: int
    inputs: int
    group_shift: int
    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[Any]
    zero_points: npt.NDArray[Any] | None


def packed_arrays(parts: Sequence[QuantizedWeight], dtype: str) -> PackedArrays | None:
    """Return some rows of one stored matrix in new memory, or None if the kernels cannot compute its values, or ``dtype`` not hold them.

    Its weights in ``dtype`` are those of :meth:`QuantizedWeight.dequantized`, bit by bit.
    """
    first, inputs = parts[0], parts[0].shape[1]
    kind_of_values = first.quantized_values.kind
    if kind_of_values not in _KINDS or first.group_index is not None or first.input_factor is not None or inputs % INPUT_GRANULE:
        return None
    kind, added = _KINDS[kind_of_values]
    scales = np.concatenate([part.scales_of_rows() for part in parts])
    shift, stored_scales = _group_shift(first.scales.block[1], scales.shape[1]), _stored_scales(scales, kind, dtype)
    if shift is None or stored_scales is None:
        return None
    zero_points = _zero_points(parts, scales.shape, added)
    low, high = _RANGES[kind]
    with np.errstate(over="ignore"):
        largest = np.maximum(np.abs(low - zero_points), np.abs(high - zero_points)) * np.abs(scales)
        if not np.isfinite(largest.astype(numpy_dtype(dtype)).astype(np.float32)).all():
            return None
    groups = count_groups(inputs, shift)
    has_zero_points = bool((zero_points != MIDDLES[kind]).any())
    return PackedArrays(
        kind=kind,
        outputs=len(scales),
        inputs=inputs,
        group_shift=shift,
        values=_packed_values(parts, kind, added),
        scales=pack_rows(stored_scales, groups),
        zero_points=pack_rows(zero_points.astype(_DTYPES[kind]), groups) if has_zero_points else None,
    )


def _group_shift(width: int, groups: int) -> int | None:
    """Return the group shift of groups of ``width`` inputs, or None if the kernels do not know it."""
    if groups == 1:
        return ONE_GROUP
    halves, rest = divmod(width, HALF_INPUTS)
    return None if rest or halves & (halves - 1) else halves.bit_length() - 1


def _zero_points(parts: Sequence[QuantizedWeight], shape: tuple[int, ...], added: int) -> Float32:
    """Return the zero point of each group of each row."""
    found = [part.zero_points_of_rows() for part in parts]
    stored = [one for one in found if one is not None]
    zero_points: Float32 = np.concatenate(stored) if stored else np.zeros(shape, np.float32)
    zero_points += np.float32(added)
    return zero_points


def _stored_scales(scales: Float32, kind: str, dtype: str) -> npt.NDArray[Any] | None:
    """Return the scales in the first dtype of the kernels that holds all of them exactly, or None if none does."""
    if kind == "e2m1":
        exponents = scales.astype(ml_dtypes.float8_e8m0fnu)
        return exponents.view(np.uint8) if np.array_equal(exponents.astype(np.float32), scales) else None
    for name in SCALE_DTYPES[dtype]:
        with np.errstate(over="ignore"):
            stored = scales.astype(numpy_dtype(name))
        if np.array_equal(stored.astype(np.float32), scales):
            return stored
    return scales


def _packed_values(parts: Sequence[QuantizedWeight], kind: str, added: int) -> npt.NDArray[np.uint8]:
    """Return the stored values, packed."""
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    packed = np.empty((count_tiles(outputs), -(-inputs // FRAGMENT_INPUTS) * FRAGMENT_NBYTES[kind]), np.uint8)
    whole: npt.NDArray[Any] | None = None
    if len(parts) > 1 or parts[0].row_order is not None:  # heads, whose rows may end within a tile, or rows that are stored apart
        whole = np.concatenate([part.unpacked() for part in parts])

    def pack(rows: slice) -> None:
        values = parts[0].rows(rows).unpacked() if whole is None else whole[rows]
        tiles = slice(rows.start // FRAGMENT_OUTPUTS, count_tiles(rows.stop))
        packed[tiles] = pack_values(_shifted(values, kind, added), kind)

    for_each(pack, row_slices(outputs, inputs, _CHUNK, multiple=FRAGMENT_OUTPUTS))
    return packed


def _shifted(values: npt.NDArray[Any], kind: str, added: int) -> npt.NDArray[Any]:
    """Return stored values as the kernels take them: modulo 256, which the ranges of both kinds exclude."""
    found: npt.NDArray[Any] = (values.view(np.uint8) + np.uint8(added % 256)).view(_DTYPES[kind])
    return found
