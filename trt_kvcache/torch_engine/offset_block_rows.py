"""Matrices in Q4_1, Q5_0 and Q5_1, copied to a device as they are stored, and dequantized there."""

from __future__ import annotations

import torch

from trt_kvcache._util.in_threads import row_slices
from trt_kvcache.checkpoint.quantized.offset_blocks import BLOCK, MIDDLES, OffsetBlocks, offset_floats, read_offset_values
from trt_kvcache.torch_engine.upload import Upload
from trt_kvcache.torch_engine.uploaded_rows import ON_DEVICE, all_finite


def dequantized_offset_blocks(stored: OffsetBlocks, dtype: torch.dtype, upload: Upload) -> torch.Tensor | None:
    """Return a whole matrix, some rows at a time; None if ``dtype`` cannot hold its values."""
    values, parts = torch.empty(stored.shape, dtype=dtype, device=upload.device), row_slices(*stored.shape, ON_DEVICE)
    for rows in parts:
        values[rows] = offset_block_values(upload(stored.blocks(rows)), stored.kind).to(dtype)
    return values if all_finite(values, parts) else None


def offset_block_values(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the values ``[rows, in]`` of blocks ``[rows, blocks, bytes]`` in float32."""
    unpacked = blocks.new_empty((len(blocks), blocks.shape[1] * BLOCK))
    read_offset_values(blocks, kind, unpacked)
    exact = unpacked.float() - MIDDLES.get(kind, 0)
    scale, *minimum = offset_floats(blocks, kind).contiguous().view(torch.float16).float().unbind(dim=-1)
    exact *= scale.repeat_interleave(BLOCK, dim=1)
    return exact + minimum[0].repeat_interleave(BLOCK, dim=1) if minimum else exact
