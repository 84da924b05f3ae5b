"""Attention on the device: ``plugins/attention/decode.cu``, ``decode_few.cu`` and ``prefill.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.attention_params import AttentionParams, score_factors
from trt_kvcache.kernels.attention_workspace import MAX_BLOCKS_PER_SM, AttentionWorkspace, partials_shape
from trt_kvcache.kernels.cuda.arguments import address
from trt_kvcache.kernels.cuda.decode_plan import DecodePlan, decode_plan
from trt_kvcache.kernels.cuda.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.kernels.cuda.prefill_plan import prefers_row_blocks, prefill_plan
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

_WARP = 32


def attend(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    plan = _decode_plan(params)
    if plan is not None:
        _decode(plan, params, workspace, stream)
    else:
        _prefill(params, workspace, stream)


def flagged_nbytes(params: AttentionParams) -> int:
    """Return how many bytes of flagged vectors, at the start of the workspace, a call uses. They must be zeros before it."""
    decode = _decode_plan(params)
    if decode is not None:
        rows = MAX_BLOCKS_PER_SM * _memory(params).multiprocessor_count * decode.rows
    else:
        plan = prefill_plan(params)
        rows = plan.blocks * plan.form.rows if plan.splits else 0
    return dense_nbytes((rows, *partials_shape(1, 1, params.q.shape[3])[1:]), "float32")


def _memory(params: AttentionParams) -> CudaMemory:
    memory = params.cache.memory
    assert isinstance(memory, CudaMemory)
    return memory


def _strides(axis: int, *tensors: DeviceTensor) -> tuple[int, ...]:
    """Return strides in bytes."""
    return tuple(tensor.strides[axis] * itemsize(tensor.dtype) for tensor in tensors)


def _decode_plan(params: AttentionParams) -> DecodePlan | None:
    if prefers_row_blocks(params):
        return None
    memory = _memory(params)
    quantized = params.kv_scales is not None
    return decode_plan(params.cache.shape, params.q.shape[1], params.group, memory.arch, memory.multiprocessor_count, quantized)


def _scales(params: AttentionParams) -> tuple[int, ...]:
    """Return the address of the scales and their strides, which count floats, and whether each token has one; nothing without scales."""
    scales = params.kv_scales
    if scales is None:
        return ()
    slot_stride, kv_stride, head_stride = scales.strides[:3] if params.scales_per_token else (0, *scales.strides)
    return (scales.ptr, slot_stride, kv_stride, head_stride, int(params.scales_per_token))


def _decode(plan: DecodePlan, params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, (q, k, v) = _memory(params), params.cache, (params.q, params.k, params.v)
    slots, _, kv_heads, tokens, head_dim = cache.shape
    several = q.shape[1] > 1
    arguments = (
        *(params.lengths.ptr, address(params.new_lengths), tokens, params.window),
        *(slots, kv_heads, plan.splits_per_head, plan.heads_per_block, params.group, *((q.shape[1],) if several else ())),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(value for tensor in (q, k, v) for value in (tensor.ptr, *_strides(0, tensor), *(_strides(1, tensor) if several else ()))),
        *(address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap)),
        *(params.out.ptr, workspace.partials.ptr, workspace.partials.ptr + workspace.flagged_nbytes),
        *_scales(params),
    )
    launch(
        memory,
        variant_name(plan.source, q.dtype, head_dim, cache.dtype),
        plan.name,
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.warps,
        shared_nbytes=plan.shared_nbytes,
        cooperative=plan.blocks > 1,
        programmatic_dependent_launch=starts_early(memory),
    )


def _append(params: AttentionParams, stream: Any) -> None:
    memory, cache, (k, v) = _memory(params), params.cache, (params.k, params.v)
    slots, width, kv_heads, head_dim = k.shape
    # A thread for each chunk of eight elements; for a quantized cache a warp for each row.
    threads = width * kv_heads * (head_dim // 8 if params.kv_scales is None else _WARP)
    arguments = (
        *(k.ptr, v.ptr, *_strides(0, k, v), *_strides(1, k, v), cache.ptr, *_strides(0, cache), *_strides(1, cache), cache.shape[3]),
        *(params.lengths.ptr, address(params.new_lengths), address(params.cos_sin), params.rotary_dim, width, kv_heads),
        *_scales(params),
    )
    launch(
        memory,
        variant_name("attention_prefill", k.dtype, head_dim, cache.dtype),
        "attention_append",
        (-(-threads // THREADS_PER_BLOCK), slots, 1),
        arguments,
        stream,
        programmatic_dependent_launch=starts_early(memory),
    )


def _prefill(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, (q, k, v) = _memory(params), params.cache, (params.q, params.k, params.v)
    plan = prefill_plan(params)
    if not plan.appends:
        _append(params, stream)
    arguments = (
        *(params.lengths.ptr, address(params.new_lengths), cache.shape[3], params.window),
        *(q.shape[0], k.shape[2], params.group, q.shape[1], plan.row_blocks, plan.order),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(q.ptr, *_strides(0, q), *_strides(1, q), k.ptr, *_strides(0, k), *_strides(1, k), v.ptr, *_strides(0, v), *_strides(1, v)),
        *(address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap)),
        *(params.out.ptr, workspace.partials.ptr),
        *_scales(params),
    )
    launch(
        memory,
        variant_name("attention_prefill", q.dtype, cache.shape[4], cache.dtype),
        f"attention_prefill_{plan.name}",
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.form.warps,
        shared_nbytes=plan.shared_nbytes,
        cooperative=plan.splits,
        programmatic_dependent_launch=starts_early(memory),
    )
