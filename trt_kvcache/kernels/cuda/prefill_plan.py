"""``PrefillPlan``: which of the prefill kernels attends to several new tokens per slot, and with which blocks."""

from __future__ import annotations

from typing import NamedTuple

from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_tiles import MAX_APPENDED_WIDTH, PrefillForm, prefill_form
from trt_kvcache.memory.cuda_memory import CudaMemory

#: Row blocks of the form ``"whole"`` for each multiprocessor, from which it is taken: up to there, smaller ones fill the GPU better.
#: Measured on an H200.
_WHOLE_BLOCKS_PER_SM = 3


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
    #: Whether several blocks may share a row block. All of them are resident at once then.
    splits: bool

    @property
    def appends(self) -> bool:
        """Whether the launch appends the new tokens; else another one has to do so before."""
        return self.name not in ("wide", "whole")


def prefill_plan(params: AttentionParams) -> PrefillPlan:
    """Return the launch for a call with several new tokens per slot.

    Notes
    -----
    The rows of a K/V head are its new tokens times its query heads. The fewer they are, the smaller a row block. Where all row blocks can
    be resident at once, K and V of each are split over the blocks that are left.
    """
    width, rows = params.q.shape[1], params.q.shape[1] * params.group
    if width <= MAX_APPENDED_WIDTH:
        few = plan_of(params, "16" if rows <= 16 else "32" if rows <= 32 else "64")
        if width <= few.form.tile_keys and (few.row_blocks == 1 or few.splits):
            return few
    wide, whole = plan_of(params, "wide"), plan_of(params, "whole")
    return wide if wide.splits or whole.blocks <= _WHOLE_BLOCKS_PER_SM * _memory(params).multiprocessor_count else whole


def plan_of(params: AttentionParams, name: str) -> PrefillPlan:
    """Return the launch of one of the forms."""
    memory, (slots, _, kv_heads, tokens, head_dim) = _memory(params), params.cache.shape
    form = prefill_form(head_dim, memory.arch, name)
    row_blocks = -(-params.q.shape[1] * params.group // form.rows)
    total, resident = slots * kv_heads * row_blocks, memory.multiprocessor_count * form.blocks_per_sm
    if name == "whole" or total > resident:
        return PrefillPlan(name, form, row_blocks, total, False)
    useful = total * (-(-tokens // (form.tile_keys * form.min_tiles)) + 1)
    blocks = min(resident, useful, max(total, form.max_parts))
    return PrefillPlan(name, form, row_blocks, blocks, blocks > total)


def _memory(params: AttentionParams) -> CudaMemory:
    memory = params.cache.memory
    assert isinstance(memory, CudaMemory)
    return memory
