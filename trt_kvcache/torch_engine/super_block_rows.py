"""``SuperBlockRows``: rows in Q4_K, Q5_K or Q6_K, copied to a device as they are stored, and unpacked there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.super_blocks import SuperBlocks, factors_of, read_scales, read_values
from trt_kvcache.kernels.packed_layout import HALF_INPUTS
from trt_kvcache.kernels.super_block_layout import MIDDLES, SCALE_INPUTS, SUPER_BLOCK
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE, all_finite


@dataclass(frozen=True, kw_only=True)
class SuperBlockRows:
    """Rows of a matrix, as in ``SuperBlocks``."""

    values: torch.Tensor  # [rows, in], uint8
    scales: torch.Tensor  # [rows, in / 32, 2], uint8: a scale and a minimum, or two scales (int8) in Q6_K
    factors: torch.Tensor  # [rows, super-blocks, 1 or 2], float16: of scales and of minimums

    @classmethod
    def of(cls, stored: torch.Tensor, kind: str) -> SuperBlockRows:
        """Return the rows of blocks ``[rows, super-blocks, bytes]`` of a type of GGUF."""
        rows, inputs = len(stored), stored.shape[1] * SUPER_BLOCK
        values, scales = stored.new_empty((rows, inputs)), stored.new_empty((rows, inputs // HALF_INPUTS, 2))
        read_values(stored, kind, values)
        read_scales(stored, kind, scales)
        return cls(values=values, scales=scales, factors=factors_of(stored, kind).contiguous().view(torch.float16))

    def dequantized(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, rounded once to ``dtype``. ``kind``: as in the layout of the kernels."""
        exact, factors = self.values.float() - MIDDLES[kind], self.factors.float()
        per_scale, per_factor = SCALE_INPUTS[kind], SUPER_BLOCK // SCALE_INPUTS[kind]
        of_groups = factors.repeat_interleave(per_factor, dim=1).unbind(dim=-1)
        if kind == "q6_k":
            scales = of_groups[0] * self.scales.flatten(1).view(torch.int8).float()
            return (exact * scales.repeat_interleave(per_scale, dim=1)).to(dtype)
        both = (factor * self.scales[..., index].float() for index, factor in enumerate(of_groups))
        scale, minimum = (one.repeat_interleave(per_scale, dim=1) for one in both)
        return (exact * scale - minimum).to(dtype)


def dequantized_super_blocks(stored: SuperBlocks, dtype: torch.dtype, upload: Upload) -> torch.Tensor | None:
    """Return a whole matrix, some rows at a time; None if ``dtype`` cannot hold its values."""
    values, blocks = torch.empty(stored.shape, dtype=dtype, device=upload.device), stored.blocks()
    parts = row_slices(*stored.shape, ON_DEVICE)
    for rows in parts:
        values[rows] = SuperBlockRows.of(upload(blocks[rows]), stored.kind).dequantized(stored.kind.lower(), dtype)
    return values if all_finite(values, parts) else None
