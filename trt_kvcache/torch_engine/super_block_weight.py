"""``SuperBlockWeight``: a matrix in Q4_K, Q5_K or Q6_K on a device, in the layout of the kernels for super-blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, count_tiles
from trt_kvcache.kernels.packed_tensors import SuperBlockTensors
from trt_kvcache.kernels.super_block_layout import FACTORS, LARGEST, fragment_nbytes
from trt_kvcache.memory.base import Memory
from trt_kvcache.torch_engine.device_view import device_view
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_places import unpack_rows
from trt_kvcache.torch_engine.super_block_places import pack_factors, pack_scales, pack_super_blocks, unpack_scales, unpack_super_blocks
from trt_kvcache.torch_engine.super_block_rows import SuperBlockRows
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE


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
        parts = []
        for rows in row_slices(outputs, inputs, ON_DEVICE, multiple=FRAGMENT_OUTPUTS):
            some = SuperBlockRows.of(upload(blocks[rows]), stored.kind)
            values[rows.start // FRAGMENT_OUTPUTS : count_tiles(rows.stop)] = pack_super_blocks(some.values, kind)
            parts.append((some.scales, some.factors))
        scales, factors = (torch.cat(of_rows) for of_rows in zip(*parts, strict=True))
        if not _bound(factors, kind) <= torch.finfo(getattr(torch, dtype)).max:
            return None
        return cls(
            dtype=getattr(torch, dtype),
            memory=memory,
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            values=values,
            scales=pack_scales(scales),
            factors=pack_factors(factors),
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

    def split(self, count: int) -> list[SuperBlockWeight]:
        """See :class:`PackedMatrix`."""
        parts = zip(self.values.chunk(count), self.scales.chunk(count), self.factors.chunk(count), strict=True)
        return [
            replace(self, outputs=self.outputs // count, values=values, scales=scales, factors=factors) for values, scales, factors in parts
        ]

    def dequantized(self) -> torch.Tensor:
        """See :class:`PackedMatrix`."""
        rows = SuperBlockRows(
            values=unpack_super_blocks(self.values, self.kind, self.outputs, self.inputs),
            scales=unpack_scales(self.scales, self.outputs),
            factors=torch.stack([unpack_rows(self.factors[..., index], self.outputs) for index in range(FACTORS[self.kind])], dim=-1),
        )
        return rows.dequantized(self.kind, self.dtype)


def _bound(factors: torch.Tensor, kind: str) -> float:
    """Return a bound of the magnitudes of values; not a finite number if a factor is none."""
    bounds = factors.double().abs() * torch.tensor(LARGEST[kind], dtype=torch.float64, device=factors.device)
    return float(bounds.sum(dim=-1).amax())


def joined_super_blocks(parts: Sequence[SuperBlockWeight]) -> SuperBlockWeight | None:
    """Return matrices of the same input with concatenated outputs; None if one launch cannot take them, as their formats differ."""
    if len({(part.kind, part.inputs) for part in parts}) > 1 or any(part.outputs % FRAGMENT_OUTPUTS for part in parts[:-1]):
        return None
    return replace(
        parts[0],
        outputs=sum(part.outputs for part in parts),
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        factors=torch.cat([part.factors for part in parts]),
    )
