"""Attention on the device: ``plugins/attention/decode.cu`` and ``plugins/attention/prefill.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.attention_params import AttentionParams, score_factors
from trt_kvcache.kernels.attention_tiles import (
    DECODE_ROWS,
    MIN_PDL_ARCH,
    arch_number,
    decode_shared_nbytes,
    decode_tiles,
    extend_form,
    prefill_form,
)
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.tensor import DeviceTensor

_WARP = 32

#: Blocks of the long form for each multiprocessor, up to which prefill takes its short form. Measured on an H200.
_SHORT_FORM_BLOCKS_PER_SM = 3

_EXTEND_WIDTH = 1 << 30
_APPEND_WIDTH = 32


def attend(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    if params.q.shape[1] == 1:
        _decode(params, workspace, stream)
    elif _extends(params):
        _extend(params, workspace, stream)
    else:
        _append(params, "attention_prefill", stream)
        _prefill(params, stream)


def _memory(params: AttentionParams) -> CudaMemory:
    memory = params.cache.memory
    assert isinstance(memory, CudaMemory)
    return memory


def _address(tensor: DeviceTensor | None) -> int:
    """Return the address of a tensor; 0, a null pointer, for none."""
    return 0 if tensor is None else int(tensor.ptr)


def _strides(axis: int, *tensors: DeviceTensor) -> tuple[int, ...]:
    """Return strides in bytes."""
    return tuple(tensor.strides[axis] * itemsize(tensor.dtype) for tensor in tensors)


def _decode(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, (q, k, v) = _memory(params), params.cache, (params.q, params.k, params.v)
    slots, _, kv_heads, tokens, head_dim = cache.shape
    rows = next(rows for rows in DECODE_ROWS if params.group <= rows)
    tiles = decode_tiles(head_dim, memory.arch)
    heads = slots * kv_heads
    # As many blocks as can be resident at once, but none that could not have enough tiles of its own.
    useful_blocks = heads * -(-tokens // (tiles["TILE_TOKENS"] * tiles["MIN_TILES_PER_BLOCK"]))
    blocks = min(memory.multiprocessor_count * tiles["BLOCKS_PER_SM"], useful_blocks)
    splits_per_head, heads_per_block = blocks // heads, -(-heads // blocks)
    arguments = (
        *(params.lengths.ptr, _address(params.new_lengths), tokens, params.window),
        *(slots, kv_heads, splits_per_head, heads_per_block, params.group),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(q.ptr, *_strides(0, q), k.ptr, *_strides(0, k), v.ptr, *_strides(0, v)),
        *(_address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap)),
        *(params.out.ptr, workspace.partials.ptr, workspace.partials.ptr + workspace.zeroed_nbytes),
    )
    launch(
        memory,
        variant_name("attention_decode", cache.dtype, head_dim),
        f"attention_decode_{rows}",
        (blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * tiles["WARPS"],
        shared_nbytes=decode_shared_nbytes(head_dim, rows, memory.arch),
        cooperative=blocks > 1,
        programmatic_dependent_launch=arch_number(memory.arch) >= MIN_PDL_ARCH,
    )


def _extends(params: AttentionParams) -> bool:
    return params.q.shape[1] <= _EXTEND_WIDTH


def _extend(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, (q, k, v) = _memory(params), params.cache, (params.q, params.k, params.v)
    slots, _, kv_heads, tokens, head_dim = cache.shape
    width = q.shape[1]
    def of(name):
        form = extend_form(head_dim, memory.arch, name)
        row_blocks = -(-width * params.group // form.rows)
        return form, row_blocks, slots * kv_heads * row_blocks, memory.multiprocessor_count * form.blocks_per_sm

    name = next((one for one in ("16", "32", "64") if width * params.group <= int(one)), "64" if width <= _APPEND_WIDTH else "wide")
    form, row_blocks, items, resident = of(name)
    if name != "wide" and width > form.tile_keys:
        name = "wide"
        form, row_blocks, items, resident = of(name)
    if items > resident and (name == "wide" or row_blocks > 1) and of("whole")[2] > _SHORT_FORM_BLOCKS_PER_SM * memory.multiprocessor_count:
        name = "whole"
        form, row_blocks, items, resident = of(name)
    if name in ("wide", "whole"):
        _append(params, "attention_extend", stream)
    splits = name != "whole" and items <= resident
    useful_blocks = items * (-(-tokens // (form.tile_keys * form.min_tiles)) + 1)
    blocks = min(resident, useful_blocks) if splits else items
    arguments = (
        *(params.lengths.ptr, _address(params.new_lengths), tokens, params.window),
        *(slots, kv_heads, params.group, width, row_blocks),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(q.ptr, *_strides(0, q), *_strides(1, q), k.ptr, *_strides(0, k), *_strides(1, k), v.ptr, *_strides(0, v), *_strides(1, v)),
        *(_address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap)),
        *(params.out.ptr, workspace.extend_partials.ptr),
    )
    launch(
        memory,
        variant_name("attention_extend", cache.dtype, head_dim),
        f"attention_extend_{name}",
        (blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * form.warps,
        shared_nbytes=form.shared_nbytes,
        cooperative=splits and blocks > 1,
        programmatic_dependent_launch=arch_number(memory.arch) >= MIN_PDL_ARCH,
    )


def _cache_arguments(params: AttentionParams) -> tuple[int, ...]:
    """Return the arguments for cache, lengths and angles, which are the same in both launches of a prefill."""
    cache = params.cache
    addresses = (params.lengths.ptr, _address(params.new_lengths), _address(params.cos_sin))
    return (cache.ptr, *_strides(0, cache), *_strides(1, cache), cache.shape[3], *addresses, params.rotary_dim)


def _append(params: AttentionParams, source: str, stream: Any) -> None:
    k, v = params.k, params.v
    slots, width, kv_heads, head_dim = k.shape
    words = width * kv_heads * head_dim // 2  # of two elements, one for each thread
    arguments = (k.ptr, v.ptr, *_strides(0, k, v), *_strides(1, k, v), *_cache_arguments(params), width, kv_heads)
    name = variant_name(source, params.cache.dtype, head_dim)
    launch(
        _memory(params),
        name,
        "attention_append",
        (-(-words // THREADS_PER_BLOCK), slots, 1),
        arguments,
        stream,
        programmatic_dependent_launch=arch_number(_memory(params).arch) >= MIN_PDL_ARCH and source == "attention_extend",
    )


def _prefill(params: AttentionParams, stream: Any) -> None:
    memory, q = _memory(params), params.q
    slots, width, heads, head_dim = q.shape
    long_blocks = -(-width // prefill_form(head_dim, memory.arch, short=False).rows) * heads * slots
    short = long_blocks <= _SHORT_FORM_BLOCKS_PER_SM * memory.multiprocessor_count
    form = prefill_form(head_dim, memory.arch, short=short)
    arguments = (
        *(q.ptr, *_strides(0, q), *_strides(1, q), *_cache_arguments(params)),
        *(params.out.ptr, width, params.group, params.window, *score_factors(params.scale, params.softcap)),
    )
    launch(
        memory,
        variant_name("attention_prefill", params.cache.dtype, head_dim),
        "attention_prefill_short" if short else "attention_prefill",
        (heads, -(-width // form.rows), slots),
        arguments,
        stream,
        threads=_WARP * form.warps,
        shared_nbytes=form.shared_nbytes,
    )
