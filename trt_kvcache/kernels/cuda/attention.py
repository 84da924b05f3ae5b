"""Attention on the device: ``plugins/attention_decode.cu`` and ``plugins/attention_prefill.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.attention_call import AttentionCall, score_factors
from trt_kvcache.kernels.attention_tiles import (
    DECODE_ROWS,
    FIRST_EARLY_ARCH,
    arch_number,
    attention_name,
    decode_shared_nbytes,
    decode_tiles,
    prefill_form,
)
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch
from trt_kvcache.memory.cuda import CudaMemory

_WARP = 32

#: Blocks for each multiprocessor up to which prefill takes its short form: measured on an H200.
_FEW = 3


def _address(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.ptr)


def attend(call: AttentionCall, workspace: AttentionWorkspace, stream: Any) -> None:
    """Turn, append, and attend."""
    if call.q.shape[1] == 1:
        _decode(call, workspace, stream)
    else:
        _append(call, stream)
        _prefill(call, stream)


def _memory(call: AttentionCall) -> CudaMemory:
    memory = call.cache.memory
    assert isinstance(memory, CudaMemory)
    return memory


def _nbytes(call: AttentionCall, axis: int, *names: str) -> tuple[int, ...]:
    """Return strides in bytes."""
    return tuple(getattr(call, name).strides[axis] * itemsize(call.cache.dtype) for name in names)


def _cache_of(call: AttentionCall) -> tuple[int, ...]:
    """Return the arguments that all kernels have for the cache, lengths and angles."""
    places = (call.lengths.ptr, _address(call.new_lengths), _address(call.cos_sin))
    return (call.cache.ptr, *_nbytes(call, 0, "cache"), *_nbytes(call, 1, "cache"), call.cache.shape[3], *places, call.rotary_dim)


def _decode(call: AttentionCall, workspace: AttentionWorkspace, stream: Any) -> None:
    memory = _memory(call)
    slots, _, kv_heads, tokens, head_dim = call.cache.shape
    rows = next(rows for rows in DECODE_ROWS if call.group <= rows)
    tiles = decode_tiles(head_dim, memory.arch)
    heads = slots * kv_heads
    blocks = min(
        memory.multiprocessor_count * tiles["BLOCKS_PER_SM"], heads * -(-tokens // (tiles["TILE_TOKENS"] * tiles["MIN_TILES_PER_BLOCK"]))
    )
    arguments = (
        *(call.lengths.ptr, _address(call.new_lengths), tokens, call.window),
        *(slots, kv_heads, blocks // heads, -(-heads // blocks), call.group),
        *(call.cache.ptr, *_nbytes(call, 0, "cache"), *_nbytes(call, 1, "cache")),
        *(number for name in "qkv" for number in (getattr(call, name).ptr, *_nbytes(call, 0, name))),
        *(_address(call.cos_sin), call.rotary_dim, *score_factors(call.scale, call.softcap)),
        *(call.out.ptr, workspace.partials.ptr, workspace.partials.ptr + workspace.zeroed_nbytes),
    )
    launch(
        memory,
        attention_name("attention_decode", call.cache.dtype, head_dim),
        f"attention_decode_{rows}",
        (blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * tiles["WARPS"],
        shared_nbytes=decode_shared_nbytes(head_dim, rows, memory.arch),
        together=blocks > 1,
        early=arch_number(memory.arch) >= FIRST_EARLY_ARCH,
    )


def _append(call: AttentionCall, stream: Any) -> None:
    slots, width, kv_heads, head_dim = call.k.shape
    words = width * kv_heads * head_dim // 2
    strides = (*_nbytes(call, 0, "k", "v"), *_nbytes(call, 1, "k", "v"))
    arguments = (call.k.ptr, call.v.ptr, *strides, *_cache_of(call), width, kv_heads)
    name = attention_name("attention_prefill", call.cache.dtype, head_dim)
    launch(_memory(call), name, "attention_append", (-(-words // THREADS_PER_BLOCK), slots, 1), arguments, stream)


def _prefill(call: AttentionCall, stream: Any) -> None:
    memory = _memory(call)
    slots, width, heads, head_dim = call.q.shape
    blocks = -(-width // prefill_form(head_dim, memory.arch, short=False)[0]) * heads * slots
    short = blocks <= _FEW * memory.multiprocessor_count
    rows, warps, nbytes = prefill_form(head_dim, memory.arch, short=short)
    strides = (*_nbytes(call, 0, "q"), *_nbytes(call, 1, "q"))
    launch(
        memory,
        attention_name("attention_prefill", call.cache.dtype, head_dim),
        "attention_prefill_short" if short else "attention_prefill",
        (heads, -(-width // rows), slots),
        (call.q.ptr, *strides, *_cache_of(call), call.out.ptr, width, call.group, call.window, *score_factors(call.scale, call.softcap)),
        stream,
        threads=_WARP * warps,
        shared_nbytes=nbytes,
    )
