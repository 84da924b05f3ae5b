"""``PrefillPlan``: the kernel and the blocks for attention of several new tokens per slot."""

from __future__ import annotations

from typing import NamedTuple

from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_tiles import MAX_APPENDED_WIDTH, PrefillVariant, few_tiles, prefill_variant, spread_nbytes
from trt_kvcache.memory.shapes import dense_nbytes

#: Row blocks per multiprocessor above which ``"whole"`` is chosen: with fewer, smaller row blocks fill the GPU better. Measured on an H200.
_WHOLE_BLOCKS_PER_SM = 3

#: The same if the advantage is less: a multiprocessor has room for one warpgroup block only, or the cache is long.
_FEWER_WHOLE_BLOCKS_PER_SM = 1.5

#: A cache is long if it has at least this many times the new tokens (their row blocks then probably see about the same number of keys), and
#: this many keys per multiprocessor.
_LONG_CACHE, _LONG_CACHE_KEYS_PER_SM = 32, 1536

#: The head dim from which 64 rows of a warpgroup take less time than 32 of single warps.
_MIN_WARPGROUP_HEAD_DIM = 128

#: Assignment of row blocks to blocks (``plugins/attention/prefill_params.cuh``): one block each, the last tokens first; split-KV, where
#: several blocks may share a row block; one block each, with a long and a short row block in the two blocks of a multiprocessor.
FROM_LAST, SPLIT, IN_PAIRS = 0, 1, 2

#: Bytes of K and V for each multiprocessor up to which row blocks take less time than a decode kernel for a few new tokens of many rows.
#: Measured on an H200.
_SHORT_CACHE_NBYTES_PER_SM = 64 * 1024

#: Spare blocks, as a share of the row blocks, from which split-KV is faster than pairs.
_MIN_SPARE_SHARE = 0.25


class PrefillPlan(NamedTuple):
    """A launch of a prefill kernel. It depends on shapes alone: lengths are on the device."""

    #: One of :data:`~trt_kvcache.kernels.attention_tiles.PREFILL_VARIANTS`.
    name: str
    #: Its tile sizes.
    variant: PrefillVariant
    #: Row blocks of a slot and K/V head.
    row_blocks: int
    #: Blocks of the launch.
    blocks: int
    #: Assignment of row blocks to blocks: ``FROM_LAST``, ``SPLIT`` or ``IN_PAIRS``.
    order: int
    #: True if this launch appends the new tokens; otherwise a launch before it does.
    appends: bool
    #: Bytes of dynamic shared memory of a block. If all blocks are resident at once, they are more than a block needs, so that each
    #: multiprocessor gets its share: with room for three blocks, some could hold three and others one, where each should hold two.
    shared_nbytes: int

    @property
    def splits(self) -> bool:
        """True if several blocks may share a row block (split-KV): then all blocks are resident at once."""
        return self.order == SPLIT


def prefill_plan(params: AttentionParams) -> PrefillPlan:
    """Return the launch for a call with several new tokens per slot."""
    # The rows of a K/V head are its new tokens times its query heads: the fewer, the smaller a row block. If all row blocks can be resident
    # at once, the spare blocks split their K and V. Few tokens in several row blocks over a long cache, if it is quantized or not all of
    # these are split, are faster in blocks of four warps, two to a multiprocessor, than of eight, though another launch appends. Over rows
    # that are stored already nothing may append, which the kernels for few tokens do over a cache of 16 bits.
    width, rows, multiprocessors = params.q.shape[1], params.q.shape[1] * params.group, params.memory.multiprocessor_count
    few, wide = plan_of(params, "64"), plan_of(params, "wide")
    tokens, row_blocks = params.cache.shape[3], params.q.shape[0] * params.cache.shape[2] * wide.row_blocks
    is_long = tokens >= _LONG_CACHE * width and tokens * row_blocks >= _LONG_CACHE_KEYS_PER_SM * multiprocessors
    if width <= MAX_APPENDED_WIDTH and (params.k is not None or params.kv_scales is not None):
        if rows <= 16:
            few = plan_of(params, "16")
        elif rows <= 32 and not (few.variant.warpgroups and params.q.shape[3] >= _MIN_WARPGROUP_HEAD_DIM):
            few = plan_of(params, "32")
        fits = width <= few.variant.tile_keys and (few.row_blocks == 1 or few.splits)
        shared = params.kv_scales is None and few.blocks >= 2 * params.q.shape[0] * params.cache.shape[2] * few.row_blocks
        in_wide = is_long and few.row_blocks > 1 and not shared and wide.variant.warpgroups and wide.variant.blocks_per_sm > 1
        if fits and not in_wide:
            return few
    if not is_long and row_blocks <= multiprocessors:
        return plan_of(params, "short")
    if wide.splits:
        return wide
    whole, alone = plan_of(params, "whole"), wide.variant.warpgroups and (is_long or wide.variant.blocks_per_sm == 1)
    most = _FEWER_WHOLE_BLOCKS_PER_SM if alone else _WHOLE_BLOCKS_PER_SM
    return wide if whole.blocks <= most * multiprocessors else whole


def prefers_row_blocks(params: AttentionParams) -> bool:
    """Return True if a few new tokens per slot are faster in row blocks than in a decode kernel that has room for them."""
    # With warpgroups, over a short cache: prologue and epilogue take most of the time, and with many rows a decode kernel merges results
    # of many warps in its epilogue.
    (slots, _, kv_heads, tokens, head_dim), width = params.cache.shape, params.q.shape[1]
    if width == 1 or params.kv_scales is not None:  # a decode step computes nothing more
        return False
    memory = params.memory
    if not prefill_variant(head_dim, memory.arch, "64").warpgroups:
        return False
    nbytes = dense_nbytes((slots, 2, kv_heads, tokens, head_dim), params.q.dtype)
    is_short = nbytes <= _SHORT_CACHE_NBYTES_PER_SM * memory.multiprocessor_count
    return is_short and 2 * width * params.group > few_tiles(head_dim, memory.arch)["MAX_ROWS"]


def plan_of(params: AttentionParams, name: str) -> PrefillPlan:
    """Return the launch of one of :data:`~trt_kvcache.kernels.attention_tiles.PREFILL_VARIANTS`."""
    memory, (slots, _, kv_heads, tokens, head_dim) = params.memory, params.cache.shape
    quantized = params.kv_scales is not None
    variant = prefill_variant(head_dim, memory.arch, name, quantized)
    appends = not quantized and name not in ("short", "wide", "whole")
    row_blocks = -(-params.q.shape[1] * params.group // variant.rows)
    total, resident = slots * kv_heads * row_blocks, memory.multiprocessor_count * variant.blocks_per_sm
    useful = total * (-(-tokens // (variant.tile_keys * variant.min_tiles)) + 1)
    blocks, order = min(resident, useful, max(total, variant.max_splits)), SPLIT
    if name == "whole" or total > resident:
        blocks, order = total, FROM_LAST
    elif variant.blocks_per_sm == 2 and resident < (1 + _MIN_SPARE_SHARE) * total:
        blocks, order = total, IN_PAIRS
    elif blocks <= total:
        order = FROM_LAST
    least = 0 if order == FROM_LAST else spread_nbytes(memory.arch, variant.blocks_per_sm)
    return PrefillPlan(name, variant, row_blocks, blocks, order, appends, max(variant.shared_nbytes, least))
