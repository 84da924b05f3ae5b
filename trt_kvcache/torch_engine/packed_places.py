"""Packed weights in the layout of ``trt_kvcache/kernels/packed_layout.py``, made by torch on their device, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, STORED_SHAPES, TO_ROWS, count_tiles


def pack_values(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return quantized values ``[outputs, inputs]`` (int4: 0 to 15; int8; bits of e2m1) as bytes ``[tiles, fragments * bytes]``."""
    outputs, inputs = values.shape
    whole = F.pad(values.view(torch.uint8), (0, -inputs % FRAGMENT_INPUTS, 0, -outputs % FRAGMENT_OUTPUTS))
    tiles, fragments = whole.shape[0] // FRAGMENT_OUTPUTS, whole.shape[1] // FRAGMENT_INPUTS
    if kind == "int8":
        stored = whole.view(tiles, 2, 8, fragments, 2, 4, 8).permute(0, 3, 4, 2, 5, 1, 6)
    else:
        split = whole.view(tiles, 2, 8, fragments, 2, 4, 2, 2, 2)
        stored = (split[..., 0, :] | split[..., 1, :] << 4).permute(0, 3, 2, 5, 1, 4, 7, 6)
    return stored.reshape(tiles, -1)


def unpack_values(packed: torch.Tensor, kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Return the quantized values ``[outputs, inputs]`` of :func:`pack_values`, as uint8 or int8 (e2m1: its bits)."""
    values = packed.view(len(packed), -1, *STORED_SHAPES[kind])
    values = values.view(torch.int8) if kind == "int8" else torch.stack((values & 15, values >> 4), dim=-1)
    return values.permute(TO_ROWS[kind]).reshape(len(packed) * FRAGMENT_OUTPUTS, -1)[:outputs, :inputs]


def pack_rows(of_rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return scales or zero points ``[outputs, groups]`` as ``[tiles, groups, 8, 2]``; ``groups``: with those of padding."""
    outputs, count = of_rows.shape
    whole = F.pad(of_rows, (0, groups - count, 0, -outputs % FRAGMENT_OUTPUTS))
    return whole.view(count_tiles(outputs), 2, 8, groups).permute(0, 3, 2, 1).contiguous()


def unpack_rows(of_tiles: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return scales or zero points ``[outputs, groups]`` of :func:`pack_rows`."""
    return of_tiles.permute(0, 3, 2, 1).reshape(-1, of_tiles.shape[1])[:outputs]
