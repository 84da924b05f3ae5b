"""``PackedMatrices``: quantized weights in the layout of the kernels, as bytes that an operation takes: see ``PackedFormat``.

What the kernels compute from them are the dequantized weights, rounded once, as in the PyTorch engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache.builder.network.packed_arrays import in_tiles, pack_values
from trt_kvcache.builder.network.super_block_arrays import super_block_arrays
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.linear_kernels import INPUT_GRANULE
from trt_kvcache.kernels.linear_tiles import NVFP4_SCALES, PACKED_BITS
from trt_kvcache.kernels.nvfp4_scales import NVFP4_GROUP, NVFP4_LIMIT, kernel_factors_of, nvfp4_factor
from trt_kvcache.kernels.packed_layout import (
    FRAGMENT_OUTPUTS,
    MIDDLES,
    NVFP4_GROUPS,
    PACKED_KINDS,
    VALUE_RANGES,
    count_groups,
    shift_of_groups,
)
from trt_kvcache.kernels.source_variants import SCALE_DTYPES as SCALE_DTYPES_OF
from trt_kvcache.ops.packed_format import KINDS, SCALE_DTYPES, PackedFormat

Array = npt.NDArray[Any]

#: Largest finite number, by dtype.
_LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.FEp127")}

#: Bits of a NaN of e4m3 without its sign, which kernels for older GPUs take for a number.
_NAN = 0x7F


@dataclass(frozen=True, eq=False)
class PackedMatrices:
    """Matrices of equal shape in one format, one after another."""

    format: PackedFormat
    arrays: dict[str, Array]  # int32 [n]: values, scales and, if there are some, zero points or factors

    @classmethod
    def of(cls, parts: Sequence[QuantizedWeight | SuperBlocks], dtype: str) -> PackedMatrices | None:
        """Return matrices for rows of a dtype; None if the kernels do not know their format, or their formats differ."""
        if dtype not in ELEMENT_TYPES:
            return None
        groups = [part for part in parts if isinstance(part, QuantizedWeight)]
        super_blocks = [part for part in parts if isinstance(part, SuperBlocks)]
        if groups and super_blocks:
            return None
        return cls._of_groups(groups, dtype) if groups else cls._of_super_blocks(super_blocks, dtype)

    @classmethod
    def _of_super_blocks(cls, parts: Sequence[SuperBlocks], dtype: str) -> PackedMatrices | None:
        found = [super_block_arrays(part, _LARGEST[dtype]) for part in parts]
        arrays, kinds = [one for one in found if one is not None], {part.kind.lower() for part in parts}
        if len(arrays) < len(found) or len(kinds) > 1 or not _are_whole_tiles([part.shape[0] for part in parts]):
            return None
        joined = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
        return cls(PackedFormat(kind=KINDS.index(kinds.pop()) + 1, group_shift=0, scales=0), _as_int32(joined))

    @classmethod
    def _of_groups(cls, parts: Sequence[QuantizedWeight], dtype: str) -> PackedMatrices | None:
        found = [_packed(part, dtype) for part in parts]
        packed = [one for one in found if one is not None]
        if not packed or len(packed) < len(found) or len({(one.kind, one.shift, one.values.shape[1]) for one in packed}) > 1:
            return None
        factors = [(one.factor, len(one.values)) for one in packed if one.factor is not None]
        kind, outputs = packed[0].kind, [len(one.scales) for one in packed]
        if not _are_whole_tiles(outputs):
            return None
        names = {one.scales.dtype.name for one in packed}
        scales_dtype = names.pop() if len(names) == 1 else "float32"
        groups = count_groups(parts[0].shape[1], packed[0].shift)
        scales = np.concatenate([in_tiles(one.scales.astype(numpy_dtype(scales_dtype)), groups) for one in packed])
        firsts = scales[:, :, :1, :1]
        is_shared = kind == "e4m3" and not any(count % FRAGMENT_OUTPUTS for count in outputs) and bool((scales == firsts).all())
        has_zero_points = any(one.zero_points is not None for one in packed)
        arrays = {
            "values": np.concatenate([one.values for one in packed]),
            "scales": np.repeat(firsts, 2, axis=3) if is_shared else scales,
        }
        if has_zero_points:
            arrays["zero_points"] = np.concatenate([in_tiles(one.all_zero_points(), groups) for one in packed])
        if factors:
            exact, tiles = [factor for factor, _ in factors], [count for _, count in factors]
            both = np.array(exact, np.float32), kernel_factors_of(exact, dtype)
            arrays["factors"] = np.concatenate([np.repeat(one, tiles, axis=0) for one in both])
        format_ = PackedFormat(
            kind=KINDS.index(kind) + 1,
            group_shift=packed[0].shift,
            scales=SCALE_DTYPES.index(scales_dtype),
            shared_scales=int(is_shared),
            zero_points=int(has_zero_points),
        )
        return cls(format_, _as_int32(arrays))


def _are_whole_tiles(outputs: Sequence[int]) -> bool:
    """Return True if matrices of these numbers of outputs can follow one another."""
    return len(outputs) == 1 or not any(count % FRAGMENT_OUTPUTS for count in outputs)


def _as_int32(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(array).reshape(-1).view(np.int32) for name, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class _Packed:
    """One matrix: values in tiles, and scales and zero points ``[outputs, groups]``."""

    kind: str
    shift: int
    values: Array
    scales: Array
    zero_points: Array | None
    factor: tuple[float, float] | None = None  # of all scales of NVFP4

    def all_zero_points(self) -> Array:
        """Return the zero points, those of a matrix without any too."""
        if self.zero_points is not None:
            return self.zero_points
        return np.full(self.scales.shape, MIDDLES[self.kind], np.uint8 if PACKED_BITS[self.kind] < 8 else np.int8)


def _packed(weight: QuantizedWeight, dtype: str) -> _Packed | None:
    """Return a matrix as the kernels take it, or None if they do not know its format, or ``dtype`` cannot hold its values."""
    kind_of_values, inputs = weight.quantized_values.kind, weight.shape[1]
    if kind_of_values not in PACKED_KINDS or inputs % INPUT_GRANULE or weight.input_factor is not None or weight.group_index is not None:
        return None
    if kind_of_values == "e2m1" and weight.scales.stored.dtype == numpy_dtype(NVFP4_SCALES):
        return _packed_nvfp4(weight, dtype)
    shift = shift_of_groups(weight.scales.block[1], weight.scales.stored.shape[1])
    if shift is None:
        return None
    (kind, added), values, scales = PACKED_KINDS[kind_of_values], weight.unpacked(), weight.scales_of_rows()
    if kind == "e4m3" and (values.view(np.uint8) & np.uint8(_NAN) == _NAN).any():
        return None
    zero_points = _zero_points(weight.zero_points_of_rows(), scales, kind, added)
    stored = _stored_scales(scales, kind, _scales_dtypes(weight, dtype))
    if stored is None or not _can_hold(dtype, kind, scales, zero_points):
        return None
    shifted = (values.astype(np.int16) + added).astype(np.int8 if kind == "int8" else np.uint8) if added else values
    return _Packed(kind, shift, pack_values(shifted, kind), stored, zero_points)


def _packed_nvfp4(weight: QuantizedWeight, dtype: str) -> _Packed | None:
    """Return a matrix in NVFP4; None if the kernels would compute other weights, or ``dtype`` cannot hold them."""
    scales = weight.scales
    factor = nvfp4_factor(scales.factor, scales.divisor, dtype) if scales.block == (1, NVFP4_GROUP) else None
    with np.errstate(over="ignore", invalid="ignore"):
        exact = weight.scales_of_rows()
    if factor is None or not np.abs(exact).max() < NVFP4_LIMIT or not _can_hold(dtype, "e2m1", exact, None):
        return None
    stored = replace(weight, scales=replace(scales, factor=1.0, divisor=1.0)).scales_of_rows().astype(scales.stored.dtype)
    return _Packed("e2m1", NVFP4_GROUPS, pack_values(weight.unpacked(), "e2m1"), stored, None, factor)


def _zero_points(stored: npt.NDArray[np.float32] | None, scales: Array, kind: str, added: int) -> Array | None:
    """Return the zero point of each group of each row, as the kernels take it; None if all are the middle."""
    if stored is None and added == MIDDLES[kind]:
        return None
    values = np.zeros(scales.shape, np.int16) if stored is None else stored.astype(np.int16)
    zero_points = (values + added).astype(np.uint8 if PACKED_BITS[kind] < 8 else np.int8)
    return zero_points if (zero_points != MIDDLES[kind]).any() else None


def _scales_dtypes(weight: QuantizedWeight, dtype: str) -> Sequence[str]:
    """Return the dtypes of scales to try: the one of the file, if the kernels know it, or else of FP8 float32 alone."""
    scales, dtypes = weight.scales, SCALE_DTYPES_OF[dtype]
    is_exact = scales.factor == scales.divisor == 1
    of_file = [name for name in dtypes[:-1] if is_exact and numpy_dtype(name) == scales.stored.dtype]
    return of_file or ([] if weight.quantized_values.kind == "e4m3" else dtypes)


def _stored_scales(scales: npt.NDArray[np.float32], kind: str, dtypes: Sequence[str]) -> Array | None:
    """Return the scales in the first of these dtypes that holds all of them exactly, or else in float32; None for others of e2m1."""
    with np.errstate(over="ignore"):
        if kind == "e2m1":
            exponents = scales.astype(ml_dtypes.float8_e8m0fnu)
            return exponents.view(np.uint8) if np.array_equal(exponents.astype(np.float32), scales) else None
        for name in dtypes:
            stored = scales.astype(numpy_dtype(name))
            if len(dtypes) == 1 or np.array_equal(stored.astype(np.float32), scales):
                return stored
    return scales


def _can_hold(dtype: str, kind: str, scales: npt.NDArray[np.float32], zero_points: Array | None) -> bool:
    """Return True if ``dtype`` can hold all values with these scales and zero points."""
    low, high = VALUE_RANGES[kind]
    middles: Any = MIDDLES[kind] if zero_points is None else zero_points.astype(np.float32)
    with np.errstate(over="ignore"):
        largest = np.maximum(np.abs(low - middles), np.abs(high - middles)) * np.abs(scales)
        return bool(np.isfinite(largest.astype(numpy_dtype(dtype))).all())
