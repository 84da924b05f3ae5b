"""Packed weights in the layout of ``trt_kvcache/kernels/packed_layout.py``, made by torch on their device, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.kernels.linear_tiles import PACKED_BITS
from trt_kvcache.kernels.packed_layout import FRAGMENT_INPUTS, FRAGMENT_OUTPUTS, STORED_SHAPES, TO_ROWS, count_tiles

_VALUE_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def pack_values(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return quantized values ``[outputs, inputs]`` (int4: 0 to 15; int8; bits of floats) as bytes ``[tiles, fragments * bytes]``."""
    outputs, inputs = values.shape
    whole = F.pad(values.view(torch.uint8), (0, -inputs % FRAGMENT_INPUTS, 0, -outputs % FRAGMENT_OUTPUTS))
    tiles, fragments = whole.shape[0] // FRAGMENT_OUTPUTS, whole.shape[1] // FRAGMENT_INPUTS
    if PACKED_BITS[kind] == 8:
        stored = whole.view(tiles, 2, 8, fragments, 2, 4, 8).permute(0, 3, 4, 2, 5, 1, 6)
    else:
        split = whole.view(tiles, 2, 8, fragments, 2, 4, 2, 2, 2)
        stored = (split[..., 0, :] | split[..., 1, :] << 4).permute(0, 3, 2, 5, 1, 4, 7, 6)
    return stored.reshape(tiles, -1)


def unpack_values(packed: torch.Tensor, kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Return the quantized values ``[outputs, inputs]`` of :func:`pack_values`, as uint8, int8 or e4m3 (e2m1: its bits)."""
    values = packed.view(len(packed), -1, *STORED_SHAPES[kind])
    if PACKED_BITS[kind] == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1)
    rows = values.permute(TO_ROWS[kind]).reshape(len(packed) * FRAGMENT_OUTPUTS, -1)[:outputs, :inputs]
    return rows.view(_VALUE_DTYPES.get(kind, torch.uint8))


def pack_rows(of_rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Return scales or zero points ``[outputs, groups]`` as ``[tiles, groups, 8, 2]``; ``groups``: with those of padding."""
    outputs, count = of_rows.shape
    whole = F.pad(of_rows, (0, groups - count, 0, -outputs % FRAGMENT_OUTPUTS))
    return whole.view(count_tiles(outputs), 2, 8, groups).permute(0, 3, 2, 1).contiguous()


def unpack_rows(of_tiles: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return scales or zero points ``[outputs, groups]`` of :func:`pack_rows`."""
    return by_row(of_tiles).permute(0, 3, 2, 1).reshape(-1, of_tiles.shape[1])[:outputs]


def by_row(of_tiles: torch.Tensor) -> torch.Tensor:
    """Return scales of rows or of tiles as those of rows, ``[tiles, groups, 8, 2]``."""
    return of_tiles.expand(-1, -1, FRAGMENT_OUTPUTS // 2, -1)


def by_tile(of_rows: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return scales ``[tiles, groups, 8, 2]`` as ``[tiles, groups, 1, 2]`` if the outputs of each tile share them."""
    firsts = of_rows[:, :, :1, :1]
    if not torch.equal(unpack_rows(firsts.expand(-1, -1, -1, 2), outputs), unpack_rows(of_rows, outputs)):
        return of_rows
    return firsts.expand(-1, -1, -1, 2).contiguous()
