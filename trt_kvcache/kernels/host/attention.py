"""Attention in NumPy, in float32: what ``plugins/attention`` computes, but probabilities are not rounded."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_workspace import AttentionWorkspace
from trt_kvcache.kernels.host.arrays import Array, array_of
from trt_kvcache.kernels.host.quantized_kv import append_rows, live_rows


def _apply_rope(rows: Array, angles: Array | None) -> Array:
    """Apply RoPE to rows (n, heads, D) by angles (n, 2, rotary_dim / 2), in float32, and round to the dtype of the rows."""
    if angles is None:
        return rows
    half = angles.shape[2]
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    low, high = (rows[..., first : first + half].astype(np.float32) for first in (0, half))
    rotated: Array = rows.copy()
    rotated[..., :half] = (low * cos - high * sin).astype(rows.dtype)
    rotated[..., half : 2 * half] = (high * cos + low * sin).astype(rows.dtype)
    return rotated


def attend(params: AttentionParams, workspace: AttentionWorkspace, stream: Any) -> None:
    q, k, v, cache, out = (array_of(tensor) for tensor in (params.q, params.k, params.v, params.cache, params.out))
    width, tokens = q.shape[1], cache.shape[3]
    new_lengths = np.full(len(q), width) if params.new_lengths is None else array_of(params.new_lengths)
    table = None if params.cos_sin is None else array_of(params.cos_sin)
    all_scales = None if params.kv_scales is None else array_of(params.kv_scales)
    for slot, (past, new) in enumerate(zip(array_of(params.lengths).tolist(), new_lengths.tolist(), strict=True)):
        count = max(min(new, width, tokens - past), 0) if past >= 0 else 0
        end = past + count
        angles = None if table is None else table[past:end]
        queries = _apply_rope(q[slot, :count], angles).astype(np.float32)
        scales = all_scales[slot] if all_scales is not None and params.scales_per_token else all_scales
        append_rows(cache[slot], scales, past, _apply_rope(k[slot, :count], angles), v[slot, :count], params.cache.dtype)
        out[slot, count:] = 0
        if not count:
            continue
        keys, values = live_rows(cache[slot], scales, slice(end))
        behind = np.arange(past, end)[:, None] - np.arange(end)
        masked = (behind < 0) | ((behind >= params.window) if params.window else False)
        for head in range(q.shape[2]):
            scores = queries[:, head] @ keys[head // params.group].T * np.float32(params.scale)
            if params.softcap:
                scores = np.float32(params.softcap) * np.tanh(scores / np.float32(params.softcap))
            scores[masked] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            result = weights @ values[head // params.group] / weights.sum(axis=1, keepdims=True)
            out[slot, :count, head] = result.astype(out.dtype)
