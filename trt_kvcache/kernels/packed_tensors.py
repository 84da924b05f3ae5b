"""Packed matrices as the kernels take them: ``PackedTensors`` in groups of inputs, ``SuperBlockTensors`` in super-blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.launch import address
from trt_kvcache.kernels.linear_tiles import TILE_ROWS, TILED_ROWS
from trt_kvcache.kernels.nvfp4_scales import NVFP4_UNIT, nvfp4_scales
from trt_kvcache.kernels.packed_layout import FRAGMENT_OUTPUTS, MIDDLES, count_tiles, groups_of, unpack_rows, unpack_values
from trt_kvcache.kernels.source_variants import (
    PACKED_EXPERT_SOURCE,
    PACKED_EXPERT_TILE_SOURCE,
    PACKED_LINEAR_SOURCE,
    SUPER_BLOCK_EXPERT_SOURCE,
    SUPER_BLOCK_EXPERT_TILE_SOURCE,
    SUPER_BLOCK_SOURCE,
    packed_variant_name,
    variant_name,
)
from trt_kvcache.kernels.super_block_layout import dequantized_super_blocks
from trt_kvcache.memory.tensor import DeviceTensor


class PackedMatrix(Protocol):
    """A packed matrix ``[outputs, inputs]``, or a stack of them: their tiles follow each other, see ``expert_kernels.py``."""

    @property
    def kind(self) -> str:
        """Key of ``PACKED_BITS``."""

    @property
    def outputs(self) -> int:
        """Rows of a matrix."""

    @property
    def values(self) -> DeviceTensor:
        """Quantized values, uint8 ``[tiles, bytes]``."""

    @property
    def prefix(self) -> str:
        """Start of the names of its kernels."""

    @property
    def pointers(self) -> tuple[int, ...]:
        """Addresses that a kernel takes."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that a kernel takes."""

    def variant(self, dtype: str, rows: int) -> str:
        """Return the compiled variant for elements of ``dtype``, and rows of ``ROW_COUNTS``."""

    def expert_variant(self, dtype: str) -> str:
        """Return the compiled variant for experts."""

    def expert_tile_variant(self, dtype: str) -> str:
        """Return the compiled variant for the rows of a prompt."""

    def on_host(self, dtype: np.dtype[Any], matrix: int = 0) -> Array:
        """Return the weights of a matrix of a stack in host memory."""


@dataclass(frozen=True, kw_only=True)
class PackedTensors:
    """A matrix ``[outputs, inputs]``: ``(quantized value - zero point) * scale``, rounded once. Inputs are a multiple of 8."""

    # The layout is that of ``packed_layout.py``.
    # On a GPU weights are read before earlier launches on the stream have ended: none of them may still write them.
    kind: str  # "int4", "int8", "e4m3" without NaN, or "e2m1" with scales e8m0, or e4m3 of NVFP4; the last two without zero points
    outputs: int
    inputs: int
    group_shift: int
    values: DeviceTensor  # uint8 [tiles, bytes]
    scales: DeviceTensor  # [tiles, groups, 8, 2], or of e4m3 [tiles, groups, 1, 2] for all outputs of a tile; a dtype of scale_dtypes()
    zero_points: DeviceTensor | None  # uint8 or int8 [tiles, groups, 8, 2]
    factor: tuple[float, float] | None = None  # of all scales of NVFP4: see nvfp4_scales()
    kernel_factor: tuple[float, float] | None = None  # the one that the kernels take for it, without NVFP4_UNIT: see nvfp4_kernel_factor()
    factors: DeviceTensor | None = None  # of each tile, for kernels of experts and of tiles: float32 [tiles, 2]
    kernel_factors: DeviceTensor | None = None  # the ones that the kernels take for them, times NVFP4_UNIT: see kernel_factors_of()

    @property
    def prefix(self) -> str:
        """See :class:`PackedMatrix`."""
        return "packed" if self.zero_points is None else "packed_zero_points"

    @property
    def pointers(self) -> tuple[int, ...]:
        """See :class:`PackedMatrix`."""
        return self.values.ptr, self.scales.ptr, address(self.zero_points if self.kernel_factors is None else self.kernel_factors)

    @property
    def numbers(self) -> tuple[int, ...]:
        """See :class:`PackedMatrix`."""
        if self.kernel_factor is not None:
            return self.scales.shape[1], *(np.array(self.kernel_factor, np.float32) * np.float32(NVFP4_UNIT)).view(np.int32).tolist()
        return self.scales.shape[1], self.group_shift, self.scales.shape[2]

    def variant(self, dtype: str, rows: int) -> str:
        """See :class:`PackedMatrix`."""
        return packed_variant_name(PACKED_LINEAR_SOURCE, dtype, rows, self.kind, self.scales.dtype)

    def expert_variant(self, dtype: str) -> str:
        """See :class:`PackedMatrix`."""
        return packed_variant_name(PACKED_EXPERT_SOURCE, dtype, TILE_ROWS, self.kind, self.scales.dtype)

    def expert_tile_variant(self, dtype: str) -> str:
        """See :class:`PackedMatrix`."""
        return packed_variant_name(PACKED_EXPERT_TILE_SOURCE, dtype, TILED_ROWS, self.kind, self.scales.dtype)

    def on_host(self, dtype: np.dtype[Any], matrix: int = 0) -> Array:
        """See :class:`PackedMatrix`."""
        shape, tiles = (self.outputs, self.inputs), _tiles_of(matrix, self.outputs)
        values = unpack_values(array_of(self.values)[tiles], self.kind, shape).astype(np.float32)
        group = groups_of(self.inputs, self.group_shift)
        zero_points: Any = MIDDLES[self.kind]
        if self.zero_points is not None:
            zero_points = unpack_rows(array_of(self.zero_points)[tiles], self.outputs).astype(np.float32)[:, group]
        stored = unpack_rows(array_of(self.scales)[tiles], self.outputs)
        if self.factor is not None:
            stored = nvfp4_scales(stored, self.factor)
        elif self.factors is not None:
            high, low = np.repeat(array_of(self.factors)[tiles], FRAGMENT_OUTPUTS, axis=0)[: self.outputs].T[:, :, None]
            stored = nvfp4_scales(stored, (high, low))
        scales = (stored.view(ml_dtypes.float8_e8m0fnu) if stored.dtype == np.uint8 else stored).astype(np.float32)[:, group]
        with np.errstate(over="ignore"):
            found: Array = ((values - zero_points) * scales).astype(dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class SuperBlockTensors:
    """A matrix ``[outputs, inputs]`` in the layout of ``super_block_layout.py``: as ``gguf`` dequantizes it, then rounded.

    A multiple of 256 inputs. On a GPU it is read before earlier launches on the stream have ended: none of them may still write it.
    """

    kind: str  # "q4_k", "q5_k" or "q6_k"
    outputs: int
    inputs: int
    values: DeviceTensor  # uint8 [tiles, bytes]
    scales: DeviceTensor  # uint8 [tiles, fragments, 8, 8]
    factors: DeviceTensor  # float16 [tiles, super-blocks, 8, 2, 1 or 2]

    prefix = "super_blocks"
    numbers = ()

    @property
    def pointers(self) -> tuple[int, ...]:
        """See :class:`PackedMatrix`."""
        return self.values.ptr, self.scales.ptr, self.factors.ptr

    def variant(self, dtype: str, rows: int) -> str:
        """See :class:`PackedMatrix`."""
        return variant_name(SUPER_BLOCK_SOURCE, dtype, rows, self.kind)

    def expert_variant(self, dtype: str) -> str:
        """See :class:`PackedMatrix`."""
        return variant_name(SUPER_BLOCK_EXPERT_SOURCE, dtype, TILE_ROWS, self.kind)

    def expert_tile_variant(self, dtype: str) -> str:
        """See :class:`PackedMatrix`."""
        return variant_name(SUPER_BLOCK_EXPERT_TILE_SOURCE, dtype, TILED_ROWS, self.kind)

    def on_host(self, dtype: np.dtype[Any], matrix: int = 0) -> Array:
        """See :class:`PackedMatrix`."""
        tiles = _tiles_of(matrix, self.outputs)
        values, scales, factors = (array_of(tensor)[tiles] for tensor in (self.values, self.scales, self.factors))
        found: Array = dequantized_super_blocks(values, scales, factors, self.kind, (self.outputs, self.inputs)).astype(dtype)
        return found


def _tiles_of(matrix: int, outputs: int) -> slice:
    """Return the tiles of a matrix of a stack."""
    count = count_tiles(outputs)
    return slice(matrix * count, (matrix + 1) * count)
