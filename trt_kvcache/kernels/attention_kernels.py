"""Attention over the cache: RoPE, append and attention of the new tokens of each slot, in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.dtypes import SCALED_KV_DTYPES, itemsize
from trt_kvcache.errors import DTypeError, LayoutError, RangeError, ShapeError
from trt_kvcache.kernels.attention_params import HEAD_SCALES_NDIM, TOKEN_SCALES_NDIM, AttentionParams, score_factors
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, HEAD_DIMS, MAX_GROUP, MAX_SCORE_FACTOR, MIN_SCORE_FACTOR
from trt_kvcache.kernels.attention_workspace import MAX_BLOCKS_PER_SM, AttentionWorkspace, partials_shape
from trt_kvcache.kernels.decode_plan import DecodePlan, decode_plan
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.kv_quantization import append_rows, live_rows
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, address, launch, starts_early
from trt_kvcache.kernels.layer_views import CACHE_NDIM, check_layer, check_place
from trt_kvcache.kernels.prefill_plan import PrefillPlan, prefers_row_blocks, prefill_plan
from trt_kvcache.kernels.scale_views import scales_in_rows
from trt_kvcache.kernels.source_variants import TREE_SOURCE, shared_variant, tree_variant, variant_name
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS, positions_and_distances
from trt_kvcache.memory.shapes import ROW_GRANULE, SCALES_GRANULE, dense_nbytes, is_dense
from trt_kvcache.memory.tensor import DeviceTensor

_Q_NDIM, _WARP = 4, 32


def split_qkv(qkv: DeviceTensor, num_heads: int, num_kv_heads: int) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor]:
    """Return q, k and v as views of one packed tensor.

    Parameters
    ----------
    qkv : DeviceTensor ``[B, s, num_heads + 2 * num_kv_heads, D]``
        Output of a fused projection. It is not copied.
    num_heads, num_kv_heads : int
        Query heads, and K/V heads.

    Returns
    -------
    q, k, v : DeviceTensor
        ``[B, s, num_heads, D]``, and twice ``[B, s, num_kv_heads, D]``.

    Raises
    ------
    ShapeError
        The tensor has another number of heads.
    """
    heads = num_heads + 2 * num_kv_heads
    if qkv.ndim != _Q_NDIM or qkv.shape[2] != heads:
        raise ShapeError(f"qkv: expected a tensor [B, s, {heads}, D], got {qkv!r}.")
    size = qkv.strides[2] * itemsize(qkv.dtype)

    def part(first: int, count: int) -> DeviceTensor:
        shape = (*qkv.shape[:2], count, qkv.shape[3])
        return DeviceTensor(qkv.allocation, shape=shape, dtype=qkv.dtype, strides=qkv.strides, offset=qkv.offset + first * size)

    return part(0, num_heads), part(num_heads, num_kv_heads), part(num_heads + num_kv_heads, num_kv_heads)


def attend(
    q: DeviceTensor,
    k: DeviceTensor | None,
    v: DeviceTensor | None,
    cache: DeviceTensor,
    lengths: DeviceTensor,
    *,
    out: DeviceTensor,
    workspace: AttentionWorkspace,
    new_lengths: DeviceTensor | None = None,
    cos_sin: DeviceTensor | None = None,
    kv_scales: DeviceTensor | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: DeviceTensor | None = None,
    ancestors: DeviceTensor | None = None,
    stream: Any,
) -> None:
    """Apply RoPE to q and k, append k and v to the cache, and compute causal attention for the new tokens.

    Token t of slot b has the position ``lengths[b] + t``, but in a tree (``ancestors``). Lengths are read on the device and not changed.

    Parameters
    ----------
    q : DeviceTensor ``[B, s, num_heads, D]`` float16 or bfloat16
        Before RoPE. The heads of a token are contiguous; slots and tokens may be strided (:func:`split_qkv`). D is 64, 80, 96, 128, 256
        or 512.
    k, v : DeviceTensor ``[B, s, num_kv_heads, D]``, or None
        Before RoPE; ``num_heads`` is 1 to 16 times ``num_kv_heads``. Both None: the rows of the new tokens are in the cache already, as
        a call for an earlier layer with the same ``lengths`` has appended them, and the call leaves the cache as it is. So layers share
        K and V.
    cache : DeviceTensor ``[B, 2, num_kv_heads, S, D]``
        Of either layout: a view by ``get_combined_kv_cache``. Of the dtype of q, or of ``float8_e4m3fn`` or ``int8`` with ``kv_scales``.
        Keys are stored after RoPE. Rows that are not live are never used.
    lengths : DeviceTensor (B,) int32
        Live rows of each slot. New tokens that exceed S are dropped: not appended, and zeros in ``out``.
    out : DeviceTensor ``[B, s, num_heads, D]``
        Contiguous; overwritten. May be q itself if that is contiguous.
    workspace : AttentionWorkspace
        Large enough for these heads. Calls that share one must not run at the same time.
    new_lengths : DeviceTensor (B,) int32, optional
        New tokens of each slot, at most s. The rest is padding: not appended, and zeros in ``out``. By default all s are new.
    cos_sin : DeviceTensor ``[S or more, 2, rotary_dim / 2]`` float32, optional
        Cosines and sines of each position; elements i and ``i + rotary_dim / 2`` are a pair (NeoX). Without it RoPE is not applied.
    kv_scales : DeviceTensor ``[2, num_kv_heads]`` or ``[B, 2, num_kv_heads, S or more]`` float32, optional
        Only with a quantized cache, and always with one: real value = stored value * scale. Of two dimensions: a scale for each head of
        K, then of V; contiguous. Of four: a scale for each token and head, which the call writes with the new rows; heads are
        contiguous with a multiple of 4 tokens, and slots, K and V start at multiples of 16 bytes, as in the cache.
    scale : float, optional
        Factor of ``q @ k``, 1e-6 to 1e6; ``1 / sqrt(D)`` by default.
    window : int
        Sliding window: tokens that a token attends to, itself included; 0 for all.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``, 1e-6 to 1e6; 0 for no softcap.
    sinks : DeviceTensor (num_heads,) float32, optional
        Attention sinks: another logit of each query head, which joins the softmax of its scores and has no value. Not scaled or capped.
    ancestors : DeviceTensor ``[B, s]`` int64, optional
        Contiguous; at most 64 new tokens. The new tokens of a slot are a tree of draft tokens: bit j of ``ancestors[b, t]`` is set if token
        j is token t or an ancestor of it. Parents come before their children, so ``j <= t``; later bits are ignored, and bit t counts
        as set. Token t attends to the rows before the call, to its ancestors and to itself. Its position, for RoPE and window, is
        ``lengths[b]`` plus the number of its ancestors; its row in the cache is ``lengths[b] + t`` nevertheless.
    stream : cuda.core.Stream or GraphBuilder
        The launches are ordered on it: one for up to 32 new tokens, as a rule, else two. The call neither waits nor allocates, and can
        be captured in a graph.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, PlaceError, RangeError, ClosedError
        An argument does not fit. Nothing was changed.

    Notes
    -----
    Sums are float32. ``plugins/README.md`` describes the kernels.

    In a quantized cache a row is stored as ``row / scale``, rounded to nearest (ties to even) and held within 448 (``float8_e4m3fn``) or
    127 (``int8``) of zero, all in float32: keys after RoPE and rounded to the dtype of q. The scale of a token is its largest magnitude
    divided by 448 or 127; 1 for a row of zeros. NaN stays NaN in ``float8_e4m3fn``, becomes 0 in ``int8``, and does not count for a
    scale. New tokens attend to their own K and V as stored, so results do not depend on the chunks of a prompt.

    Examples
    --------
    One slot that holds 3 tokens gets a fourth, in host memory:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory
    >>> from trt_kvcache.kernels import AttentionWorkspace, attend
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> def tensor(*shape, dtype=np.float16):
    ...     return memory.to_device(np.ones(shape, dtype), stream=stream)
    >>> q, k, v, out = tensor(1, 1, 4, 64), tensor(1, 1, 2, 64), tensor(1, 1, 2, 64), tensor(1, 1, 4, 64)
    >>> cache, lengths = tensor(1, 2, 2, 8, 64), memory.to_device(np.array([3], np.int32), stream=stream)
    >>> workspace = AttentionWorkspace(memory, num_heads=4, num_kv_heads=2, head_dim=64, stream=stream)
    >>> attend(q, k, v, cache, lengths, out=out, workspace=workspace, stream=stream)
    >>> bool((out.numpy() == 1).all())
    True
    """
    check_layer("cache", cache, CACHE_NDIM)
    slots, _, kv_heads, tokens, head_dim = cache.shape
    if cache.dtype not in (*ELEMENT_TYPES, *SCALED_KV_DTYPES):
        raise DTypeError(f"cache: expected one of {', '.join((*ELEMENT_TYPES, *SCALED_KV_DTYPES))}, got {cache.dtype}.")
    if head_dim not in HEAD_DIMS:
        raise ShapeError(f"cache: expected head_dim one of {HEAD_DIMS}, got {cache!r}.")
    check_place("q", q, cache)
    if q.ndim != _Q_NDIM or q.shape[2] % kv_heads or not 1 <= q.shape[2] // kv_heads <= MAX_GROUP or not 1 <= q.shape[1] <= tokens:
        raise ShapeError(f"q: expected [{slots}, 1 to {tokens}, {kv_heads} times 1 to {MAX_GROUP}, {head_dim}], got {q!r}.")
    quantized = cache.dtype in SCALED_KV_DTYPES
    if quantized and q.dtype not in ELEMENT_TYPES:
        raise DTypeError(f"q: expected one of {', '.join(ELEMENT_TYPES)}, got {q.dtype}.")
    width, dtype, what = q.shape[1], *((q.dtype, "q") if quantized else (cache.dtype, "the cache"))
    _check_rows("q", q, (slots, width, q.shape[2], head_dim), cache, dtype, what)
    if (k is None) != (v is None):
        raise ShapeError(f"k, v: expected two tensors, or None for both, got {k!r} and {v!r}.")
    for name, rows in (("k", k), ("v", v)):
        if rows is not None:
            _check_rows(name, rows, (slots, width, kv_heads, head_dim), cache, dtype, what)
    _check_rows("out", out, q.shape, cache, dtype, what)
    _check_kv_scales(kv_scales, cache)
    if not out.is_contiguous:
        raise LayoutError(f"out: expected a dense tensor, got {out!r}.")
    _check_lengths("lengths", lengths, cache)
    if new_lengths is not None:
        _check_lengths("new_lengths", new_lengths, cache)
    if cos_sin is not None:
        _check_cos_sin(cos_sin, cache)
    if sinks is not None:
        _check_sinks(sinks, cache, q.shape[2])
    if ancestors is not None:
        _check_ancestors(ancestors, cache, width)
    factor = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    for name, number, zero in (("scale", factor, ""), ("softcap", float(softcap), "0, or ")):
        if not MIN_SCORE_FACTOR <= number <= MAX_SCORE_FACTOR and (number or not zero):
            raise RangeError(f"{name}: expected {zero}{MIN_SCORE_FACTOR} to {MAX_SCORE_FACTOR}, got {number}.")
    int_in_range("window", window, 0)
    cache.memory.check_stream(stream)
    workspace.check("workspace", cache, q.shape[2])
    params = AttentionParams(
        q=q, k=k, v=v, cache=cache, kv_scales=kv_scales, lengths=lengths, new_lengths=new_lengths,
        cos_sin=cos_sin, out=out, scale=factor, window=window, softcap=float(softcap), sinks=sinks,
        ancestors=ancestors,
    )  # fmt: skip
    if slots:
        attend_kernel(params, workspace, stream)


def _check_rows(name: str, tensor: DeviceTensor, shape: Sequence[int], like: DeviceTensor, dtype: str, what: str) -> None:
    check_place(name, tensor, like)
    if tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype} as {what}, got {tensor.dtype}.")
    if tensor.shape != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tensor!r}.")
    apart = [stride for stride, size in zip(tensor.strides[:2], shape[:2], strict=True) if size > 1]
    if not is_dense(tensor.shape[2:], tensor.strides[2:]):
        raise LayoutError(f"{name}: expected dense heads of each token, got {tensor!r}.")
    if any(stride * itemsize(tensor.dtype) % ROW_GRANULE for stride in apart) or tensor.offset % ROW_GRANULE:
        raise LayoutError(f"{name}: expected tokens at multiples of {ROW_GRANULE} bytes, got {tensor!r} at byte {tensor.offset}.")


def _check_lengths(name: str, tensor: DeviceTensor, like: DeviceTensor) -> None:
    check_place(name, tensor, like)
    if tensor.dtype != "int32":
        raise DTypeError(f"{name}: expected int32, got {tensor.dtype}.")
    if tensor.shape != (len(like),) or not tensor.is_contiguous:
        raise ShapeError(f"{name}: expected a dense tensor of shape ({len(like)},), got {tensor!r}.")


def _check_kv_scales(scales: DeviceTensor | None, cache: DeviceTensor) -> None:
    if cache.dtype not in SCALED_KV_DTYPES:
        if scales is not None:
            raise DTypeError(f"kv_scales: expected None with a cache of {cache.dtype}, got {scales!r}.")
        return
    slots, _, heads, tokens, _ = cache.shape
    expected = f"[2, {heads}] or [{slots}, 2, {heads}, {tokens} or more, a multiple of {SCALES_GRANULE}]"
    if scales is None:
        raise DTypeError(f"kv_scales: expected a tensor {expected} with a cache of {cache.dtype}, got None.")
    check_place("kv_scales", scales, cache)
    if scales.dtype != "float32":
        raise DTypeError(f"kv_scales: expected float32, got {scales.dtype}.")
    if scales.ndim == HEAD_SCALES_NDIM and scales.shape == (2, heads):
        if not scales.is_contiguous:
            raise LayoutError(f"kv_scales: expected a dense tensor, got {scales!r}.")
        return
    fits = scales.ndim == TOKEN_SCALES_NDIM and scales.shape[:3] == (slots, 2, heads) and scales.shape[3] >= tokens
    if not fits or scales.shape[3] % SCALES_GRANULE:
        raise ShapeError(f"kv_scales: expected {expected}, got {scales!r}.")
    check_layer("kv_scales", scales_in_rows(scales), CACHE_NDIM)


def _check_cos_sin(tensor: DeviceTensor, cache: DeviceTensor) -> None:
    check_place("cos_sin", tensor, cache)
    tokens, head_dim = cache.shape[3:]
    if tensor.dtype != "float32":
        raise DTypeError(f"cos_sin: expected float32, got {tensor.dtype}.")
    fits = tensor.ndim == 3 and tensor.shape[0] >= tokens and tensor.shape[1] == 2
    if (
        not fits
        or tensor.shape[2] % 2
        or not 0 < 2 * tensor.shape[2] <= head_dim
        or not tensor.is_contiguous
        or tensor.offset % ROW_GRANULE
    ):
        raise ShapeError(f"cos_sin: expected a dense tensor [{tokens} or more, 2, rotary_dim / 2], of an even size, got {tensor!r}.")


def _check_sinks(tensor: DeviceTensor, cache: DeviceTensor, num_heads: int) -> None:
    check_place("sinks", tensor, cache)
    if tensor.dtype != "float32":
        raise DTypeError(f"sinks: expected float32, got {tensor.dtype}.")
    if tensor.shape != (num_heads,) or not tensor.is_contiguous:
        raise ShapeError(f"sinks: expected a dense tensor of shape ({num_heads},), got {tensor!r}.")


def _check_ancestors(tensor: DeviceTensor, cache: DeviceTensor, width: int) -> None:
    check_place("ancestors", tensor, cache)
    if tensor.dtype != "int64":
        raise DTypeError(f"ancestors: expected int64, got {tensor.dtype}.")
    if width > MAX_TREE_TOKENS:
        raise ShapeError(f"ancestors: expected at most {MAX_TREE_TOKENS} new tokens, got {width}.")
    if tensor.shape != (len(cache), width) or not tensor.is_contiguous:
        raise ShapeError(f"ancestors: expected a dense tensor of shape ({len(cache)}, {width}), got {tensor!r}.")


# --- NumPy, in float32; unlike in plugins/attention, probabilities are not rounded ---


def _apply_rope(rows: Array, angles: Array | None) -> Array:
    """Apply RoPE to rows (n, heads, D) with cosines and sines (n, 2, rotary_dim / 2), in float32, then round to the dtype of the rows."""
    if angles is None:
        return rows
    half = angles.shape[2]
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    low, high = (rows[..., first : first + half].astype(np.float32) for first in (0, half))
    rotated: Array = rows.copy()
    rotated[..., :half] = (low * cos - high * sin).astype(rows.dtype)
    rotated[..., half : 2 * half] = (high * cos + low * sin).astype(rows.dtype)
    return rotated


def _attend_on_host(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    q, cache, out = (array_of(tensor) for tensor in (params.q, params.cache, params.out))
    k, v = (None if tensor is None else array_of(tensor) for tensor in (params.k, params.v))
    width, tokens = q.shape[1], cache.shape[3]
    new_lengths = np.full(len(q), width) if params.new_lengths is None else array_of(params.new_lengths)
    table = None if params.cos_sin is None else array_of(params.cos_sin)
    all_scales, sinks, trees = (
        None if tensor is None else array_of(tensor) for tensor in (params.kv_scales, params.sinks, params.ancestors)
    )
    for slot, (past, new) in enumerate(zip(array_of(params.lengths).tolist(), new_lengths.tolist(), strict=True)):
        count = max(min(new, width, tokens - past), 0) if past >= 0 else 0
        end = past + count
        positions, distance = positions_and_distances(past, count, None if trees is None else trees[slot])
        angles = None if table is None else table[positions]
        queries = _apply_rope(q[slot, :count], angles).astype(np.float32)
        scales = all_scales[slot] if all_scales is not None and params.scales_per_token else all_scales
        if k is not None and v is not None:
            append_rows(cache[slot], scales, past, _apply_rope(k[slot, :count], angles), v[slot, :count], params.cache.dtype)
        out[slot, count:] = 0
        if not count:
            continue
        keys, values = live_rows(cache[slot], scales, slice(end))
        masked = (distance < 0) | ((distance >= params.window) if params.window else False)
        for head in range(q.shape[2]):
            scores = queries[:, head] @ keys[head // params.group].T * np.float32(params.scale)
            if params.softcap:
                scores = np.float32(params.softcap) * np.tanh(scores / np.float32(params.softcap))
            scores[masked] = -np.inf
            peaks = scores.max(axis=1, keepdims=True) if sinks is None else np.maximum(scores.max(axis=1, keepdims=True), sinks[head])
            weights = np.exp(scores - peaks)
            sums = weights.sum(axis=1, keepdims=True) + (0 if sinks is None else np.exp(sinks[head] - peaks))
            result = weights @ values[head // params.group] / sums
            out[slot, :count, head] = result.astype(out.dtype)


# --- CUDA: launches of plugins/attention/decode.cu, decode_few.cu and prefill.cu ---


def _attend_on_device(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    key = (params.q.shape, params.cache.shape, params.q.dtype, params.kv_scales is None, params.k is None, params.ancestors is None)
    plan = workspace.plans.get(key)
    if plan is None:
        plan = workspace.plans[key] = _decode_plan(params) or prefill_plan(params)
    if isinstance(plan, DecodePlan):
        _decode(plan, params, workspace, stream)
    else:
        _prefill(plan, params, workspace, stream)


def _strides(axis: int, *tensors: DeviceTensor) -> tuple[int, ...]:
    """Return strides in bytes."""
    return tuple([tensor.strides[axis] * tensor.numpy_dtype.itemsize for tensor in tensors])


def _decode_plan(params: AttentionParams) -> DecodePlan | None:
    if params.ancestors is not None or prefers_row_blocks(params):
        return None
    memory = params.memory
    quantized = params.kv_scales is not None
    return decode_plan(params.cache.shape, params.q.shape[1], params.group, memory.arch, memory.multiprocessor_count, quantized)


def _scales(params: AttentionParams) -> tuple[int, ...]:
    """Return address, strides in floats and a flag (1: one scale a token) of the scales; nothing without scales."""
    scales = params.kv_scales
    if scales is None:
        return ()
    slot_stride, kv_stride, head_stride = scales.strides[:3] if params.scales_per_token else (0, *scales.strides)
    return (scales.ptr, slot_stride, kv_stride, head_stride, int(params.scales_per_token))


def _decode(plan: DecodePlan, params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, q, (k, v) = params.memory, params.cache, params.q, _new_rows(params)
    slots, _, kv_heads, tokens, head_dim = cache.shape
    several = q.shape[1] > 1
    arguments = (
        *(params.lengths.ptr, address(params.new_lengths), tokens, params.window),
        *(slots, kv_heads, plan.splits_per_head, plan.heads_per_block, params.group, *((q.shape[1],) if several else ())),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(value for tensor in (q, k, v) for value in (tensor.ptr, *_strides(0, tensor), *(_strides(1, tensor) if several else ()))),
        *(address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap), address(params.sinks)),
        *(params.out.ptr, workspace.partials.ptr, workspace.partials.ptr + workspace.flagged_nbytes),
        *_scales(params),
    )
    source = variant_name(plan.source, q.dtype, head_dim, cache.dtype)
    launch(
        memory,
        shared_variant(source) if params.k is None else source,
        plan.name,
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.warps,
        shared_nbytes=plan.shared_nbytes,
        cooperative=plan.blocks > 1,
        programmatic_dependent_launch=starts_early(memory),
    )


def _prefill_source(params: AttentionParams) -> str:
    name = variant_name(TREE_SOURCE, params.q.dtype, params.q.shape[3], params.cache.dtype)
    return name if params.ancestors is None else tree_variant(name)


def _tree(params: AttentionParams) -> tuple[int, ...]:
    return () if params.ancestors is None else (params.ancestors.ptr,)


def _new_rows(params: AttentionParams) -> tuple[DeviceTensor, DeviceTensor]:
    """Return k and v. Without them the cache has their rows, and no kernel reads what is returned."""
    return (params.q, params.q) if params.k is None or params.v is None else (params.k, params.v)


def _append(params: AttentionParams, stream: Any) -> None:
    memory, cache, (k, v) = params.memory, params.cache, _new_rows(params)
    slots, width, kv_heads, head_dim = k.shape
    # A thread for each chunk of eight elements; for a quantized cache a warp for each row.
    threads = width * kv_heads * (head_dim // 8 if params.kv_scales is None else _WARP)
    arguments = (
        *(k.ptr, v.ptr, *_strides(0, k, v), *_strides(1, k, v), cache.ptr, *_strides(0, cache), *_strides(1, cache), cache.shape[3]),
        *(params.lengths.ptr, address(params.new_lengths), address(params.cos_sin), params.rotary_dim, width, kv_heads),
        *_tree(params),
        *_scales(params),
    )
    launch(
        memory,
        _prefill_source(params),
        "attention_append",
        (-(-threads // THREADS_PER_BLOCK), slots, 1),
        arguments,
        stream,
        programmatic_dependent_launch=starts_early(memory),
    )


def _prefill(plan: PrefillPlan, params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    memory, cache, q, (k, v) = params.memory, params.cache, params.q, _new_rows(params)
    if not plan.appends and params.k is not None:
        _append(params, stream)
    arguments = (
        *(params.lengths.ptr, address(params.new_lengths), cache.shape[3], params.window),
        *(q.shape[0], cache.shape[2], params.group, q.shape[1], plan.row_blocks, plan.order),
        *(cache.ptr, *_strides(0, cache), *_strides(1, cache)),
        *(q.ptr, *_strides(0, q), *_strides(1, q), k.ptr, *_strides(0, k), *_strides(1, k), v.ptr, *_strides(0, v), *_strides(1, v)),
        *(address(params.cos_sin), params.rotary_dim, *score_factors(params.scale, params.softcap), address(params.sinks)),
        *(params.out.ptr, workspace.partials.ptr),
        *_tree(params),
        *_scales(params),
    )
    launch(
        memory,
        _prefill_source(params),
        f"attention_prefill_{plan.name}",
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.variant.warps,
        shared_nbytes=plan.shared_nbytes,
        cooperative=plan.splits,
        programmatic_dependent_launch=starts_early(memory),
    )


#: Apply RoPE to q and k, append k and v to the cache, and compute attention: :class:`AttentionParams`, workspace, stream.
attend_kernel = Kernel(_attend_on_host, _attend_on_device)


def flagged_nbytes(params: AttentionParams) -> int:
    """Return the bytes of flagged vectors, at the start of the workspace, that a call uses. They must be zeros before it."""
    decode = _decode_plan(params)
    if decode is not None:
        rows = MAX_BLOCKS_PER_SM * params.memory.multiprocessor_count * decode.rows
    else:
        plan = prefill_plan(params)
        rows = plan.blocks * plan.variant.rows if plan.splits else 0
    return dense_nbytes((rows, *partials_shape(1, 1, params.q.shape[3])[1:]), "float32")
