"""``DecodePlan``: the kernel and the blocks for attention of one new token per slot, or of a few."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from trt_kvcache.kernels.attention_tiles import DECODE_HEAD_DIMS, DECODE_ROWS, MAX_FEW_TOKENS, decode_block_nbytes, decode_tiles, few_tiles


class DecodePlan(NamedTuple):
    """A launch of a decode kernel. It depends on shapes alone: lengths are on the device."""

    #: The source, and the kernel in it.
    source: str
    name: str
    #: Rows of a K/V head: new tokens times query heads.
    rows: int
    #: Warps of a block, and its bytes of dynamic shared memory.
    warps: int
    shared_nbytes: int
    #: Blocks of the launch; blocks for each K/V head of a slot; and, if there are more heads than blocks, heads for each block.
    blocks: int
    splits_per_head: int
    heads_per_block: int


@lru_cache(maxsize=256)
def decode_plan(
    cache: tuple[int, ...], width: int, group: int, arch: str, multiprocessors: int, quantized: bool = False
) -> DecodePlan | None:
    """Return the launch for a cache ``[B, 2, num_kv_heads, S, D]``; None if no decode kernel has room for the new tokens, or for a row.

    K and V are read once for all rows of a K/V head, so a few new tokens (``width``) take hardly longer than one.
    """
    (slots, _, kv_heads, tokens, head_dim), rows = cache, width * group
    if head_dim not in DECODE_HEAD_DIMS:
        return None
    if width == 1:
        source, tiles = "attention_decode", decode_tiles(head_dim, arch, quantized=quantized)
    else:
        source, tiles = "attention_decode_few", few_tiles(head_dim, arch, quantized=quantized)
        if width > MAX_FEW_TOKENS or rows > tiles["MAX_ROWS"]:
            return None
    compiled = next(count for count in DECODE_ROWS if rows <= count)
    heads = slots * kv_heads
    # All blocks that can be resident at once, but none that would have fewer tiles than pay for it.
    useful_blocks = heads * -(-tokens // (tiles["TILE_TOKENS"] * tiles["MIN_TILES_PER_BLOCK"]))
    blocks = min(multiprocessors * tiles["BLOCKS_PER_SM"], useful_blocks)
    shared_nbytes = decode_block_nbytes(head_dim, compiled, tiles, quantized=quantized)
    return DecodePlan(source, f"{source}_{compiled}", rows, tiles["WARPS"], shared_nbytes, blocks, blocks // heads, -(-heads // blocks))
