"""Weights in super-blocks in the layout of ``trt_kvcache/kernels/super_block_layout.py``, made by torch on their device, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.kernels.packed_layout import FRAGMENT_OUTPUTS
from trt_kvcache.kernels.super_block_layout import HIGH_BITS, HIGH_TO_ROWS, LOW_NBYTES, fragment_nbytes, high_bit_places
from trt_kvcache.torch_engine.packed_places import pack_rows, pack_values, unpack_values


def pack_super_blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return quantized values ``[outputs, inputs]`` (uint8) as bytes ``[tiles, fragments * bytes]``."""
    low, bits = pack_values(values & 15, "int4"), HIGH_BITS[kind]
    if not bits:
        return low
    tiles = len(low)
    whole = F.pad(values >> 4, (0, 0, 0, -len(values) % FRAGMENT_OUTPUTS))
    high = whole.view(tiles, 2, 8, -1, 2, 4, 4, 2).permute(0, 3, 2, 5, 1, 4, 6, 7).int()
    word, shift = _places(bits, values.device)
    placed = high << shift
    words = torch.stack([(placed * (word == index)).sum(dim=(4, 5, 6, 7), dtype=torch.int32) for index in range(bits)], dim=-1)
    fragments = words.shape[1]
    return torch.cat((low.view(tiles, fragments, -1), words.view(tiles, fragments, -1).view(torch.uint8)), dim=-1).view(tiles, -1)


def unpack_super_blocks(packed: torch.Tensor, kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Return the quantized values ``[outputs, inputs]`` of :func:`pack_super_blocks`."""
    bits, tiles = HIGH_BITS[kind], len(packed)
    stored = packed.view(tiles, -1, fragment_nbytes(kind))
    values = unpack_values(stored[:, :, :LOW_NBYTES].reshape(tiles, -1), "int4", outputs, inputs)
    if not bits:
        return values
    words = stored[:, :, LOW_NBYTES:].contiguous().view(torch.int32).view(tiles, -1, 8, 4, bits)
    word, shift = _places(bits, packed.device)
    high = words[..., word] >> shift & ((1 << bits) - 1)
    return values | (high.permute(HIGH_TO_ROWS).reshape(tiles * FRAGMENT_OUTPUTS, inputs)[:outputs] << 4).byte()


def _places(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    word, shift = (torch.from_numpy(places.copy()).to(device) for places in high_bit_places(bits))
    return word, shift.int()


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return two bytes for each half of each output, ``[outputs, inputs / 32, 2]``, as ``[tiles, fragments, 8, 8]``."""
    halves = scales.shape[1]
    of_tiles = pack_rows(scales.contiguous().view(torch.int16)[..., 0], halves)
    of_fragments = of_tiles.view(len(of_tiles), halves // 2, 2, 8, 2).transpose(2, 3).contiguous()
    return of_fragments.view(torch.uint8).view(len(of_tiles), halves // 2, 8, 8)


def unpack_scales(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return the bytes ``[outputs, inputs / 32, 2]`` of :func:`pack_scales`."""
    of_rows = packed.view(*packed.shape[:3], 2, 2, 2).permute(0, 4, 2, 1, 3, 5)
    return of_rows.reshape(len(packed) * FRAGMENT_OUTPUTS, -1, 2)[:outputs]


def pack_factors(factors: torch.Tensor) -> torch.Tensor:
    """Return factors ``[outputs, super-blocks, count]`` as ``[tiles, super-blocks, 8, 2, count]``."""
    return torch.stack([pack_rows(of_rows, factors.shape[1]) for of_rows in factors.unbind(-1)], dim=-1)
