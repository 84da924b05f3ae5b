"""``PackedWeight``: a quantized matrix in the format that TensorRT dequantizes, converted from any format of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.quantized_values import E2M1_VALUES
from trt_kvcache.checkpoint.quantized.weight import QuantizedWeight
from trt_kvcache.errors import BuildError

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

#: The TensorRT type of each kind of quantized values. FP4 is needed for none: e2m1 doubled is an integer.
CONSTANT_TYPES = {"int4": "int4", "uint4": "int4", "int8": "int8", "uint8": "int8", "e2m1": "int8", "e4m3": "float8_e4m3fn"}

#: The same for kinds that some GPUs have as they are, with their scales.
NATIVE_TYPES = {"e2m1": "float4_e2m1fn"}

#: The dtypes of scales of those.
_NATIVE_SCALES = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu))

#: Values of an embedding that are converted at a time.
_CHUNK = 1 << 20

#: Subtracted from unsigned values.
_MIDDLES = {"uint4": 8, "uint8": 128}


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """A quantized matrix ``[out, in]``: ``(value - offset) * scale``, with a positive scale for each block.

    TensorRT multiplies values by positive scales alone; offsets and an input order are applied by other layers.
    """

    values: Array  # [out, in] int4, int8, e4m3 or e2m1, one value an element
    scales: Array  # [blocks of out, blocks of in] float32, e4m3 or e8m0; positive
    scale_factor: float = 1.0  # float32 factor of all scales
    offsets: Float32 | None = None  # [out, blocks of in] float32, with blocks of one row; None where all are 0
    input_order: npt.NDArray[np.int32] | None = None  # [in] int32: input of each column (act-order)
    input_factor: Float32 | None = None  # [in] float32: factors of the inputs, in their own order

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        (rows, columns), (down, across) = self.values.shape, self.scales.shape
        return rows // down, columns // across

    @property
    def is_plain(self) -> bool:
        """True if it is values times scales and nothing else."""
        return self.offsets is None and self.input_order is None and self.input_factor is None

    def with_integer_values(self) -> PackedWeight | None:
        """Return the same matrix as values times scales and nothing else, or None where values less offsets are no int8."""
        if self.input_order is not None or self.input_factor is not None:
            return None
        if self.offsets is None:
            return self
        whole = np.empty(self.values.shape, np.int8)
        for rows in row_slices(
            len(whole), self.values.shape[1], _CHUNK
        ):  # a table of per-layer embeddings is the largest weight of a model
            exact = self.values[rows].astype(np.float32) - np.repeat(self.offsets[rows], self.block[1], axis=1)
            whole[rows] = exact
            if (whole[rows] != exact).any():
                return None
        return replace(self, values=whole, offsets=None)

    @classmethod
    def of(cls, name: str, parts: Sequence[QuantizedWeight], *, has_fp4: bool = False) -> PackedWeight:
        """Return the matrix of some rows of one stored matrix, in new memory, one byte a value.

        TensorRT has one block size. Where blocks differ, each is split into blocks of the greatest size that divides all.
        """
        first = parts[0]
        if first.quantized_values.kind not in CONSTANT_TYPES:
            raise BuildError(
                f"weight `{name}`: expected quantized values of kind {', '.join(CONSTANT_TYPES)}, got {first.quantized_values.kind}."
            )
        sizes = _sizes_of_blocks(first)
        width = int(np.gcd.reduce(sizes))
        as_stored = _as_stored(parts, has_fp4=has_fp4)
        if as_stored is not None:
            return replace(as_stored, scales=np.repeat(as_stored.scales, sizes // width, axis=1))
        signed = [_signed(part) for part in parts]
        values = np.concatenate([one[0] for one in signed])
        scales, offsets = (np.repeat(np.concatenate([one[index] for one in signed]), sizes // width, axis=1) for index in (1, 2))
        if not np.isfinite(scales).all():
            raise BuildError(f"weight `{name}`: expected finite scales, got others. The checkpoint may be damaged: fetch it again.")
        order = first.permutation
        if order is not None:
            values = values[:, order]
        return cls(
            values=values,
            scales=scales,
            offsets=offsets if offsets.any() else None,
            input_order=None if order is None else order.astype(np.int32),
            input_factor=first.input_factor,
        )


def _as_stored(parts: Sequence[QuantizedWeight], *, has_fp4: bool) -> PackedWeight | None:
    """Return FP8 with its blocks of several rows, and FP4 with its scales; None for others, and where a scale is not positive."""
    first = parts[0]
    values = [part.unpacked() for part in parts]
    stored = [part.stored_scales() for part in parts]
    if any(found is None for found in stored) or first.group_index is not None:
        return None
    scales = np.concatenate([found for found in stored if found is not None])
    if not (scales.astype(np.float32) > 0).all() or not np.isfinite(scales.astype(np.float32)).all():
        return None
    kind, factor = first.quantized_values.kind, first.scales.factor / first.scales.divisor
    if kind == "e2m1" and has_fp4 and scales.dtype in _NATIVE_SCALES and factor > 0:
        return PackedWeight(
            values=np.concatenate(values).view(ml_dtypes.float4_e2m1fn), scales=scales, scale_factor=factor, input_factor=first.input_factor
        )
    if kind == "e4m3" and first.scales.block[0] > 1 and len(parts) == 1 and factor == 1:
        return PackedWeight(values=values[0], scales=scales.astype(np.float32), input_factor=first.input_factor)
    return None


def _sizes_of_blocks(weight: QuantizedWeight) -> npt.NDArray[np.int64]:
    """Return the number of columns of each scale of a row."""
    width, blocks = weight.scales.block[1], weight.scales.stored.shape[1]
    if weight.group_index is not None:
        return np.bincount(weight.group_index, minlength=blocks)
    return np.diff(np.append(np.arange(blocks) * width, weight.shape[1]))


def _signed(weight: QuantizedWeight) -> tuple[Array, Float32, Float32]:
    """Return signed values ``[out, in]``, positive scales and offsets ``[out, blocks]``."""
    kind, values, scales = weight.quantized_values.kind, weight.unpacked(), weight.scales_of_rows()
    zero_points = weight.zero_points_of_rows()
    offsets = np.zeros_like(scales) if zero_points is None else zero_points
    of_column = _blocks_of_columns(weight)
    if kind == "e2m1":
        values, scales = (2 * E2M1_VALUES).astype(np.int8)[values], scales * np.float32(0.5)
    elif kind in _MIDDLES:
        values, offsets = (values.astype(np.int16) - _MIDDLES[kind]).astype(np.int8), offsets - np.float32(_MIDDLES[kind])
    negative = scales < 0
    if negative.any():
        if kind == "e4m3":
            values = np.where(negative[:, of_column], -values, values)
        else:  # s (c - o) = |s| (~c - (-1 - o)), and ~c has as many bits as c
            values = np.where(negative[:, of_column], ~values, values)
            offsets = np.where(negative, np.float32(-1) - offsets, offsets)
        scales = np.abs(scales)
    if (scales == 0).any():
        values = np.where((scales == 0)[:, of_column], values.dtype.type(0), values)
        scales, offsets = np.where(scales == 0, np.float32(1), scales), np.where(scales == 0, np.float32(0), offsets)
    return values.astype(ml_dtypes.int4) if CONSTANT_TYPES[kind] == "int4" else values, scales, offsets


def _blocks_of_columns(weight: QuantizedWeight) -> npt.NDArray[Any]:
    """Return the block of each column in the stored matrix."""
    if weight.group_index is not None:
        return weight.group_index
    return np.arange(weight.shape[1]) // min(weight.scales.block[1], weight.shape[1])
