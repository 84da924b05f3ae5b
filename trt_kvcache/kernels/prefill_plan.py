"""``PrefillPlan``: which of the prefill kernels attends to several new tokens per slot, and with which blocks."""

from __future__ import annotations

from typing import NamedTuple

from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_tiles import MAX_APPENDED_WIDTH, PrefillForm, few_tiles, prefill_form, spread_nbytes
from trt_kvcache.memory.shapes import dense_nbytes

#: Row blocks of the form ``"whole"`` for each multiprocessor, from which it is taken: up to there, smaller ones fill the GPU better.
#: Measured on an H200.
_WHOLE_BLOCKS_PER_SM = 3

#: The same where smaller ones have less of an advantage: where one of a warpgroup has a multiprocessor for itself, or in a long cache.
_FEWER_WHOLE_BLOCKS_PER_SM = 1.5

#: A cache is long if it is so many times longer than the new tokens (their row blocks then probably see about as many keys each), and each
#: multiprocessor has so many keys of it.
_LONG_CACHE, _LONG_CACHE_KEYS_PER_SM = 32, 1536

#: The head dim from which 64 rows of a warpgroup take less time than 32 of single warps.
_MIN_WARPGROUP_HEAD_DIM = 128

#: Orders of row blocks, as ``plugins/attention/prefill_params.cuh`` has them: one block for each, from the last tokens on; several blocks
#: may share one; one block for each, two of a multiprocessor in a pair of a long and a short one.
FROM_LAST, SPLIT, IN_PAIRS = 0, 1, 2

#: Bytes of K and V for each multiprocessor up to which row blocks take less time than a decode kernel for a few new tokens of many rows.
#: Measured on an H200.
_SHORT_CACHE_NBYTES_PER_SM = 64 * 1024

#: Blocks beside one for each row block, as a part of these, from which splitting K and V brings more than pairs do.
_MIN_REST = 0.25


class PrefillPlan(NamedTuple):
    """A launch of a prefill kernel. It depends on shapes alone: lengths are on the device."""

    #: One of :data:`~trt_kvcache.kernels.attention_tiles.PREFILL_FORMS`.
    name: str
    #: Its sizes.
    form: PrefillForm
    #: Row blocks of a slot and K/V head.
    row_blocks: int
    #: Blocks of the launch.
    blocks: int
    #: How they take row blocks: one of the numbers above.
    order: int
    #: Whether the launch appends the new tokens; else another one has to do so before.
    appends: bool
    #: Bytes of dynamic shared memory of a block. Where all blocks are resident at once, a multiprocessor has room for no more than its
    #: share: with room for three, some could have three, and others one instead of two.
    shared_nbytes: int

    @property
    def splits(self) -> bool:
        """Whether several blocks may share a row block. All of them are resident at once then."""
        return self.order == SPLIT


def prefill_plan(params: AttentionParams) -> PrefillPlan:
    """Return the launch for a call with several new tokens per slot."""
    width, rows, multiprocessors = params.q.shape[1], params.q.shape[1] * params.group, params.memory.multiprocessor_count
    few, wide = plan_of(params, "64"), plan_of(params, "wide")
    tokens, row_blocks = params.cache.shape[3], params.q.shape[0] * params.cache.shape[2] * wide.row_blocks
    is_long = tokens >= _LONG_CACHE * width and tokens * row_blocks >= _LONG_CACHE_KEYS_PER_SM * multiprocessors
    if width <= MAX_APPENDED_WIDTH:
        if rows <= 16:
            few = plan_of(params, "16")
        elif rows <= 32 and not (few.form.warpgroups and params.q.shape[3] >= _MIN_WARPGROUP_HEAD_DIM):
            few = plan_of(params, "32")
        fits = width <= few.form.tile_keys and (few.row_blocks == 1 or few.splits)
        shared = params.kv_scales is None and few.blocks >= 2 * params.q.shape[0] * params.cache.shape[2] * few.row_blocks
        in_wide = is_long and few.row_blocks > 1 and not shared and wide.form.warpgroups and wide.form.blocks_per_sm > 1
        if fits and not in_wide:
            return few
    if not is_long and row_blocks <= multiprocessors:
        return plan_of(params, "short")
    if wide.splits:
        return wide
    whole, alone = plan_of(params, "whole"), wide.form.warpgroups and (is_long or wide.form.blocks_per_sm == 1)
    most = _FEWER_WHOLE_BLOCKS_PER_SM if alone else _WHOLE_BLOCKS_PER_SM
    return wide if whole.blocks <= most * multiprocessors else whole


def prefers_row_blocks(params: AttentionParams) -> bool:
    """Return whether a call with a few new tokens per slot takes less time in row blocks than in a decode kernel that has room for them."""
    (slots, _, kv_heads, tokens, head_dim), width = params.cache.shape, params.q.shape[1]
    if width == 1 or params.kv_scales is not None:  # a decode step asks for nothing more
        return False
    memory = params.memory
    if not prefill_form(head_dim, memory.arch, "64").warpgroups:
        return False
    nbytes = dense_nbytes((slots, 2, kv_heads, tokens, head_dim), params.q.dtype)
    is_short = nbytes <= _SHORT_CACHE_NBYTES_PER_SM * memory.multiprocessor_count
    return is_short and 2 * width * params.group > few_tiles(head_dim, memory.arch)["MAX_ROWS"]


def plan_of(params: AttentionParams, name: str) -> PrefillPlan:
    """Return the launch of one of the forms."""
    memory, (slots, _, kv_heads, tokens, head_dim) = params.memory, params.cache.shape
    quantized = params.kv_scales is not None
    form = prefill_form(head_dim, memory.arch, name, quantized)
    appends = not quantized and name not in ("short", "wide", "whole")
    row_blocks = -(-params.q.shape[1] * params.group // form.rows)
    total, resident = slots * kv_heads * row_blocks, memory.multiprocessor_count * form.blocks_per_sm
    useful = total * (-(-tokens // (form.tile_keys * form.min_tiles)) + 1)
    blocks, order = min(resident, useful, max(total, form.max_parts)), SPLIT
    if name == "whole" or total > resident:
        blocks, order = total, FROM_LAST
    elif form.blocks_per_sm == 2 and resident < (1 + _MIN_REST) * total:
        blocks, order = total, IN_PAIRS
    elif blocks <= total:
        order = FROM_LAST
    least = 0 if order == FROM_LAST else spread_nbytes(memory.arch, form.blocks_per_sm)
    return PrefillPlan(name, form, row_blocks, blocks, order, appends, max(form.shared_nbytes, least))
