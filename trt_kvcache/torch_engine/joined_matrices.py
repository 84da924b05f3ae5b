"""Packed matrices with concatenated outputs as one matrix."""

from __future__ import annotations

from collections.abc import Sequence

from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_weight import PackedWeight, joined
from trt_kvcache.torch_engine.super_block_weight import SuperBlockWeight, joined_super_blocks


def joined_matrices(parts: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Return matrices of the same input as one; None if one launch cannot take them, as their formats differ."""
    groups = [part for part in parts if isinstance(part, PackedWeight)]
    super_blocks = [part for part in parts if isinstance(part, SuperBlockWeight)]
    if groups and super_blocks:
        return None
    return joined(groups) if groups else joined_super_blocks(super_blocks)
