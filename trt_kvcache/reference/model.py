"""The decoder in NumPy: pure functions over float32 arrays, but for the K/V rows that a step writes.

Everything is accumulated in float32, whatever the dtype of weights and cache. Shapes: A slots, s new tokens per slot,
Hq query heads, H key-value heads, S rows of cache per slot, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.model_config import ModelConfig
from trt_kvcache.reference.weights import DecoderWeights, Float32, LayerWeights, Projection

#: ``"native"`` reads the live rows of the cache, ``"mask"`` all rows under an additive mask.
Attention = Literal["native", "mask"]

# Scores of this many query rows are held at a time.
_QUERY_BLOCK = 256


def decoder_step(
    config: ModelConfig,
    weights: DecoderWeights,
    rope: tuple[Float32, Float32],
    caches: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    input_ids: npt.NDArray[np.int32],
    start: npt.NDArray[np.int32],
    last: npt.NDArray[np.int32],
    *,
    attention: Attention,
) -> Float32:
    """Run the new tokens of every slot through the model and write their K and V.

    Parameters
    ----------
    config : ModelConfig
    weights : DecoderWeights
    rope : pair of ndarray float32 ``[S, D // 2]``
        Cosine and sine.
    caches : sequence of pair of ndarray ``[A, H, S, D]``
        K and V of each layer, written in place and read back in their own dtype.
    input_ids : ndarray int32 ``[A, s]``
    start : ndarray int32 ``[A]``
        Tokens already in the cache, >= 0.
    last : ndarray int32 ``[A]``
        Which of the s tokens the logits are of.
    attention : ``"native"`` or ``"mask"``

    Returns
    -------
    ndarray float32 ``[A, vocab]``
    """
    positions = start[:, None] + np.arange(input_ids.shape[1])
    known = np.minimum(positions, rope[0].shape[0] - 1)  # rows past S are dropped: their angle does not matter
    angles = rope[0][known][:, :, None], rope[1][known][:, :, None]
    hidden = weights.embedding[input_ids]
    for layer, cache in zip(weights.layers, caches, strict=True):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        hidden = hidden + self_attention(config, layer, angles, cache, normed, start, attention)
        normed = rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
        hidden = hidden + mlp(layer, normed)
    wanted = hidden[np.arange(len(last)), last]
    logits: Float32 = rms_norm(wanted, weights.final_norm, config.rms_norm_eps) @ weights.head.T
    return logits


def self_attention(
    config: ModelConfig,
    layer: LayerWeights,
    angles: tuple[Float32, Float32],
    cache: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    hidden: Float32,
    start: npt.NDArray[np.int32],
    attention: Attention,
) -> Float32:
    """Project, rotate, write K and V into the cache, attend to it, project back. ``hidden`` and the result are ``[A, s, hidden]``."""
    slots, width, _ = hidden.shape
    q = project(layer.q, hidden).reshape(slots, width, -1, config.head_dim)
    k = project(layer.k, hidden).reshape(slots, width, -1, config.head_dim)
    v = project(layer.v, hidden).reshape(slots, width, -1, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    q, k = rotate(q, angles), rotate(k, angles)
    write_rows(cache[0], k, start)
    write_rows(cache[1], v, start)
    q = q * np.float32(config.head_dim**-0.5)
    mixed = np.empty_like(q)
    for slot in range(slots):
        first = int(start[slot])
        rows = cache[0].shape[2] if attention == "mask" else min(first + width, cache[0].shape[2])
        keys, values = (side[slot, :, :rows].astype(np.float32) for side in cache)
        mixed[slot] = attend(q[slot], keys, values, first)
    return project(layer.o, mixed.reshape(slots, width, -1))


def write_rows(cache: npt.NDArray[Any], rows: Float32, start: npt.NDArray[np.int32]) -> None:
    """Write ``rows[b, i]`` to row ``start[b] + i`` of every slot b, rounded to the dtype of the cache.

    Parameters
    ----------
    cache : ndarray ``[A, H, S, D]``
        Changed in place. Rows from S on are dropped, as TensorRT's KVCacheUpdate does.
    rows : ndarray float32 ``[A, s, H, D]``
    start : ndarray int32 ``[A]``
    """
    width, capacity = rows.shape[1], cache.shape[2]
    stored = rows.transpose(0, 2, 1, 3).astype(cache.dtype)
    for slot, first in enumerate(start):
        kept = max(0, min(width, capacity - int(first)))
        cache[slot, :, first : first + kept] = stored[slot, :, :kept]


def attend(q: Float32, keys: Float32, values: Float32, first: int) -> Float32:
    """Causal attention of one slot: new token i sees the keys j <= first + i.

    The scores of other keys get an additive mask, after which their weight is 0: a NaN among them shows, as on a device.

    Parameters
    ----------
    q : ndarray float32 ``[s, Hq, D]``
        Already scaled.
    keys, values : ndarray float32 ``[H, rows, D]``
    first : int
        Position of the first new token.

    Returns
    -------
    ndarray float32 ``[s, Hq, D]``
    """
    width, query_heads, head_dim = q.shape
    kv_heads, rows, _ = keys.shape
    grouped = q.reshape(width, kv_heads, query_heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    result = np.empty_like(grouped)
    for begin in range(0, width, _QUERY_BLOCK):
        block = slice(begin, min(begin + _QUERY_BLOCK, width))
        seen = np.arange(rows) <= first + np.arange(block.start, block.stop)[:, None]
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        result[:, :, block] = softmax(grouped[:, :, block] @ keys[:, None].swapaxes(-1, -2) + mask) @ values[:, None]
    ungrouped: Float32 = result.transpose(2, 0, 1, 3).reshape(q.shape)
    return ungrouped


def mlp(layer: LayerWeights, hidden: Float32) -> Float32:
    """Gated MLP with SiLU, ``[..., hidden]`` to ``[..., hidden]``."""
    gate = project(layer.gate, hidden)
    activated: Float32 = gate / (np.float32(1) + np.exp(-gate))
    return project(layer.down, activated * project(layer.up, hidden))


def project(projection: Projection, x: Float32) -> Float32:
    """Apply a linear map, ``[..., in]`` to ``[..., out]``, with all rows in one matrix product."""
    rows: Float32 = x.reshape(-1, x.shape[-1]) @ projection.weight.T
    if projection.bias is not None:
        rows += projection.bias
    return rows.reshape(*x.shape[:-1], -1)


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Divide by the root mean square of the last axis and multiply with ``weight``."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def rotate(x: Float32, angles: tuple[Float32, Float32]) -> Float32:
    """Rotate each pair (d, d + D/2) of ``x`` ``[A, s, heads, D]`` by its angle; cosine and sine are ``[A, s, 1, D // 2]``."""
    cos, sin = angles
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def softmax(scores: Float32) -> Float32:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Float32 = powers / powers.sum(axis=-1, keepdims=True)
    return weights
