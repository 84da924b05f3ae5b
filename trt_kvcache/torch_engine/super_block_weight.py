"""``SuperBlockWeight``: a matrix in Q4_K, Q5_K or Q6_K on a device, in the layout of the kernels for super-blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks, factors_of, scales_of, values_of
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_NBYTES, FRAGMENT_OUTPUTS, STORED_SHAPES, TO_ROWS, count_tiles
from trt_kvcache.kernels.packed_tensors import SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import (
    FACTORS,
    HIGH_BITS,
    HIGH_TO_ROWS,
    MIDDLES,
    SCALE_INPUTS,
    SUPER_BLOCK,
    fragment_nbytes,
    high_bit_places,
    pack_factors,
    pack_scales,
    pack_super_blocks,
)
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_view import device_view
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.upload import Upload

#: Values that are unpacked at a time: few enough for the cache of a CPU core.
_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True)
class SuperBlockWeight(PackedMatrix):
    """A matrix ``[outputs, inputs]`` of ``dtype``. See ``SuperBlockTensors`` for its fields."""

    dtype: torch.dtype
    memory: Memory
    kind: str
    outputs: int
    inputs: int
    values: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def of(cls, stored: SuperBlocks, dtype: str, upload: Upload, memory: Memory) -> SuperBlockWeight | None:
        """Return the matrix on the device of ``memory``, to which ``upload`` copies; None if ``dtype`` cannot hold its values."""
        kind, (outputs, inputs), blocks = stored.kind.lower(), stored.shape, stored.blocks()
        factors, scales = factors_of(blocks, stored.kind), scales_of(blocks, stored.kind)
        if not _bound(factors, kind) <= torch.finfo(getattr(torch, dtype)).max:
            return None
        values = np.empty((count_tiles(outputs), inputs // FRAGMENT_INPUTS * fragment_nbytes(kind)), np.uint8)

        def pack(rows: slice) -> None:
            tiles = slice(rows.start // FRAGMENT_OUTPUTS, count_tiles(rows.stop))
            values[tiles] = pack_super_blocks(values_of(blocks[rows], stored.kind), kind)

        for_each(pack, row_slices(outputs, inputs, _CHUNK, multiple=FRAGMENT_OUTPUTS))
        return cls(
            dtype=getattr(torch, dtype),
            memory=memory,
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            values=upload(values),
            scales=upload(pack_scales(scales)),
            factors=upload(pack_factors(factors)),
        )

    @cached_property
    def tensors(self) -> SuperBlockTensors:
        """See :class:`PackedMatrix`."""
        values, scales, factors = (device_view(tensor, self.memory) for tensor in (self.values, self.scales, self.factors))
        return SuperBlockTensors(kind=self.kind, outputs=self.outputs, inputs=self.inputs, values=values, scales=scales, factors=factors)

    @property
    def nbytes(self) -> int:
        """See :class:`PackedMatrix`."""
        return sum(tensor.nbytes for tensor in (self.values, self.scales, self.factors))

    def dequantized(self) -> torch.Tensor:
        """See :class:`PackedMatrix`."""
        exact = self._quantized_values().float() - MIDDLES[self.kind]
        factors = self.factors.permute(4, 0, 3, 2, 1).reshape(FACTORS[self.kind], -1, self.factors.shape[1])[:, : self.outputs].float()
        scales = self.scales.view(*self.scales.shape[:3], 2, 2, 2).permute(0, 4, 2, 1, 3, 5)
        scales = scales.reshape(len(self.values) * FRAGMENT_OUTPUTS, -1, 2)[: self.outputs]
        per_scale, per_factor = SCALE_INPUTS[self.kind], SUPER_BLOCK // SCALE_INPUTS[self.kind]
        of_groups = factors.repeat_interleave(per_factor, dim=-1)
        if self.kind == "q6_k":
            scale = of_groups[0] * scales.reshape(self.outputs, -1).view(torch.int8).float()
            return (exact * scale.repeat_interleave(per_scale, dim=-1)).to(self.dtype)
        scale, minimum = (one.repeat_interleave(per_scale, dim=-1) for one in of_groups * scales.permute(2, 0, 1).float())
        return (exact * scale - minimum).to(self.dtype)

    def _quantized_values(self) -> torch.Tensor:
        """Return the quantized values ``[outputs, inputs]``, uint8."""
        bits, tiles, low_nbytes = HIGH_BITS[self.kind], len(self.values), FRAGMENT_NBYTES["int4"]
        stored = self.values.view(tiles, -1, fragment_nbytes(self.kind))
        low = stored[:, :, :low_nbytes].reshape(tiles, -1, *STORED_SHAPES["int4"])
        values = torch.stack((low & 15, low >> 4), dim=-1).permute(TO_ROWS["int4"]).reshape(tiles * FRAGMENT_OUTPUTS, -1)
        if bits:
            words = stored[:, :, low_nbytes:].contiguous().view(torch.int32).view(tiles, -1, 8, 4, bits)
            word, shift = (torch.from_numpy(places.copy()).to(words.device) for places in high_bit_places(bits))
            high = words[..., word] >> shift.int() & ((1 << bits) - 1)
            values = values | (high.permute(HIGH_TO_ROWS).reshape(values.shape) << 4).byte()
        return values[: self.outputs]


def _bound(factors: npt.NDArray[np.float16], kind: str) -> float:
    """Return a bound of the magnitudes of values; not a finite number if a factor is none."""
    largest = (128 * 32,) if kind == "q6_k" else (63 * ((16 << HIGH_BITS[kind]) - 1), 63)
    return float((np.abs(factors.astype(np.float64)) * largest).sum(axis=-1).max(initial=0))


def joined_super_blocks(first: SuperBlockWeight, second: SuperBlockWeight) -> SuperBlockWeight | None:
    """Return matrices of the same input with concatenated outputs, or None if the kernels would take them for different ones."""
    if (first.kind, first.inputs) != (second.kind, second.inputs) or first.outputs % FRAGMENT_OUTPUTS:
        return None
    return replace(
        first,
        outputs=first.outputs + second.outputs,
        values=torch.cat((first.values, second.values)),
        scales=torch.cat((first.scales, second.scales)),
        factors=torch.cat((first.factors, second.factors)),
    )
