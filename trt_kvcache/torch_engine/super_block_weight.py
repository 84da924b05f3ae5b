"""``SuperBlockWeight``: a matrix in Q4_K, Q5_K or Q6_K on a device, in the layout of the kernels for super-blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks, factors_of, read_scales, read_values
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, count_tiles
from trt_kvcache.kernels.packed_tensors import SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import (
    FACTORS,
    HIGH_BITS,
    MIDDLES,
    SCALE_INPUTS,
    SUPER_BLOCK,
    fragment_nbytes,
)
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_view import device_view
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_places import unpack_rows
from trt_kvcache.torch_engine.super_block_places import pack_factors, pack_scales, pack_super_blocks, unpack_scales, unpack_super_blocks
from trt_kvcache.torch_engine.upload import Upload

#: Values on the device at a time that are not packed yet.
_ON_DEVICE = 1 << 24


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
        values = torch.empty(
            (count_tiles(outputs), inputs // FRAGMENT_INPUTS * fragment_nbytes(kind)), dtype=torch.uint8, device=upload.device
        )
        scales, factors = upload.empty_bytes((outputs, inputs // 32, 2)), []
        for rows in row_slices(outputs, inputs, _ON_DEVICE, multiple=FRAGMENT_OUTPUTS):
            some = upload(blocks[rows])
            unpacked = upload.empty_bytes((len(some), inputs))
            read_values(some, stored.kind, unpacked)
            values[rows.start // FRAGMENT_OUTPUTS : count_tiles(rows.stop)] = pack_super_blocks(unpacked, kind)
            read_scales(some, stored.kind, scales[rows])
            factors.append(factors_of(some, stored.kind).contiguous().view(torch.float16))
        of_blocks = torch.cat(factors)
        if not _bound(of_blocks, kind) <= torch.finfo(getattr(torch, dtype)).max:
            return None
        return cls(
            dtype=getattr(torch, dtype),
            memory=memory,
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            values=values,
            scales=pack_scales(scales),
            factors=pack_factors(of_blocks),
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
        exact = unpack_super_blocks(self.values, self.kind, self.outputs, self.inputs).float() - MIDDLES[self.kind]
        factors = torch.stack([unpack_rows(self.factors[..., index], self.outputs) for index in range(FACTORS[self.kind])]).float()
        scales = unpack_scales(self.scales, self.outputs)
        per_scale, per_factor = SCALE_INPUTS[self.kind], SUPER_BLOCK // SCALE_INPUTS[self.kind]
        of_groups = factors.repeat_interleave(per_factor, dim=-1)
        if self.kind == "q6_k":
            scale = of_groups[0] * scales.reshape(self.outputs, -1).view(torch.int8).float()
            return (exact * scale.repeat_interleave(per_scale, dim=-1)).to(self.dtype)
        scale, minimum = (one.repeat_interleave(per_scale, dim=-1) for one in of_groups * scales.permute(2, 0, 1).float())
        return (exact * scale - minimum).to(self.dtype)


def _bound(factors: torch.Tensor, kind: str) -> float:
    """Return a bound of the magnitudes of values; not a finite number if a factor is none."""
    largest = (128 * 32,) if kind == "q6_k" else (63 * ((16 << HIGH_BITS[kind]) - 1), 63)
    bounds = factors.double().abs() * torch.tensor(largest, dtype=torch.float64, device=factors.device)
    return float(bounds.sum(dim=-1).amax())


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
