"""Attention of the reference engine: apply RoPE, write K and V of the new tokens into the cache, attend to the cache.

Everything is accumulated in float32, whatever the dtype of the cache. Shapes: A slots, s new tokens per slot, Hq query heads,
H key-value heads, S rows of cache per slot, D head_dim.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.attention_variants import AttentionName
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.kernels.attention_kernels import attend_kernel
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import AttentionConfig, QueryScaling
from trt_kvcache.reference.step_positions import SlotTree, StepPositions
from trt_kvcache.reference.weights import Float32

#: ``"native"`` reads the live rows of K and V, ``"mask"`` reads all rows under an additive mask, ``"plugin"`` reads the live rows of
#: a combined cache.
Attention = AttentionName

#: K and V ``[A, s, H, D]`` of the new tokens, K before RoPE; None for a layer that reads rows of another one.
NewRows = tuple[Float32, Float32] | None

#: Function of q ``[A, s, Hq, D]`` of the new tokens, before RoPE and unscaled, and their K and V; returns ``[A, s, Hq, D]``.
LayerAttention = Callable[[Float32, NewRows], Float32]

#: Cosine and sine, float32 ``[A, s, 1, rotary_dim // 2]``.
Angles = tuple[Float32, Float32]

# Query rows whose scores are held at a time.
_QUERY_BLOCK = 256


class RopePositions:
    """Cosine and sine at the positions of the new tokens: ``angles``, which :meth:`update` computes in each step."""

    def __init__(self, table: Angles, positions: StepPositions) -> None:
        self._table, self._positions = table, positions
        self.angles = table

    def update(self) -> None:
        """Compute the angles of a step, whose positions are known."""
        self.angles = angles_at(self._table, self._positions.positions)


class SeparateAttention:
    """Attention of one layer, over separate K and V ``[A, H, S, D]``, with ``start`` tokens in each slot before it.

    ``masked``: all S rows are read under a mask, instead of the live rows only. ``sinks``: float32 ``[Hq]``, or None for a layer without.
    """

    def __init__(
        self,
        mixer: AttentionConfig,
        rope: RopePositions | None,
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        start: npt.NDArray[np.int32],
        positions: StepPositions,
        *,
        masked: bool,
        sinks: Float32 | None,
    ) -> None:
        self._mixer = mixer
        self._rope = rope
        self._sides = k, v
        self._start = start
        self._positions = positions
        self._masked = masked
        self._sinks = sinks

    def __call__(self, q: Float32, new: NewRows) -> Float32:
        """Write K and V of the new tokens into the cache and return the attention of q over it."""
        if new is not None:
            k, v = new
            k = k if self._rope is None else apply_rope(k, self._rope.angles)
            for side, rows in zip(self._sides, (k, v), strict=True):
                write_rows(side, rows, self._start)
        if self._rope is not None:
            q = apply_rope(q, self._rope.angles)
        q = q * np.float32(self._mixer.score_scale)
        mixed = np.empty_like(q)
        capacity = self._sides[0].shape[2]
        for slot, first in enumerate(self._start.tolist()):
            count = capacity if self._masked else min(first + q.shape[1], capacity)
            keys, values = [side[slot, :, :count].astype(np.float32) for side in self._sides]
            mixed[slot] = attend(
                q[slot],
                keys,
                values,
                first,
                window=self._mixer.window,
                softcap=self._mixer.softcap,
                sinks=self._sinks,
                tree=self._positions.tree(slot),
            )
        return mixed


class CombinedAttention:
    """Attention of one layer in one step over a combined cache ``[A, 2, H, S, D]``, by the NumPy twin of the attention kernels.

    Only K and V are rounded: to ``dtype``, and then to the dtype of the cache.
    """

    def __init__(
        self,
        mixer: AttentionConfig,
        cos_sin: DeviceTensor | None,
        cache: DeviceTensor,
        start: DeviceTensor,
        positions: StepPositions,
        workspace: AttentionWorkspace,
        stream: Any,
        *,
        kv_scales: DeviceTensor | None = None,
        sinks: DeviceTensor | None = None,
        dtype: str = "float32",
    ) -> None:
        self._mixer = mixer
        self._cos_sin = cos_sin
        self._positions = positions
        self._workspace = workspace
        self._cache = cache
        self._start = start
        self._stream = stream
        self._kv_scales = kv_scales
        self._sinks = sinks
        self._dtype = numpy_dtype(dtype)

    def __call__(self, q: Float32, new: NewRows) -> Float32:
        """Write K and V of the new tokens into the cache and return the attention of q over it."""
        memory = self._cache.memory
        assert isinstance(memory, HostMemory)
        queries = memory.to_device(q, stream=self._stream)
        stored = [part if self._kv_scales is None else part.astype(self._dtype) for part in new or ()]
        k, v = [memory.to_device(part, stream=self._stream) for part in stored] or (None, None)
        call = AttentionParams(
            q=queries,
            k=k,
            v=v,
            cache=self._cache,
            kv_scales=self._kv_scales,
            lengths=self._start,
            new_lengths=None,
            cos_sin=self._cos_sin,
            out=queries,
            scale=self._mixer.score_scale,
            window=self._mixer.window or 0,
            softcap=self._mixer.softcap or 0.0,
            sinks=self._sinks,
            ancestors=self._positions.ancestors,
        )
        attend_kernel(call, self._workspace, self._stream)
        mixed: Float32 = memory.array(queries)
        return mixed


class ScaledQueries:
    """Attention with queries scaled by position."""

    def __init__(self, attention: LayerAttention, scaling: QueryScaling, positions: StepPositions) -> None:
        self._attention = attention
        self._scaling = scaling
        self._positions = positions

    def __call__(self, q: Float32, new: NewRows) -> Float32:
        """Scale q, then attend."""
        positions = self._positions.positions[:, :, None, None]
        factors = 1 + self._scaling.beta * np.log1p(positions // self._scaling.period)
        return self._attention(q * factors.astype(np.float32), new)


class RotatedBeforeNorms:
    """Attention of q and k that are rotated before their norms: by :meth:`rotated`, not by the call."""

    def __init__(self, attention: LayerAttention, positions: RopePositions) -> None:
        self._attention = attention
        self._positions = positions

    def rotated(self, q: Float32, k: Float32) -> tuple[Float32, Float32]:
        """Return q and k of the new tokens after RoPE."""
        return apply_rope(q, self._positions.angles), apply_rope(k, self._positions.angles)

    def __call__(self, q: Float32, new: NewRows) -> Float32:
        """Attend."""
        return self._attention(q, new)


def angles_at(rope: Angles, positions: npt.NDArray[np.int64]) -> Angles:
    """Return the cosine and sine of positions ``[A, s]`` from the rows of a RoPE table.

    A position past S - 1 gets the angles of the last one: its row is not stored.
    """
    known = np.minimum(positions, rope[0].shape[0] - 1)
    return rope[0][known][:, :, None], rope[1][known][:, :, None]


def write_rows(cache: npt.NDArray[Any], rows: Float32, start: npt.NDArray[np.int32]) -> None:
    """Write ``rows [A, s, H, D]`` to rows ``start[b] + i`` of every slot b in the dtype of ``cache [A, H, S, D]``.

    Rows at S or beyond are dropped, as TensorRT's KVCacheUpdate layer does.
    """
    width, capacity = rows.shape[1], cache.shape[2]
    stored = rows.transpose(0, 2, 1, 3).astype(cache.dtype)
    if width == 1 and start.max() < capacity:
        cache[np.arange(len(start)), :, start] = stored[:, :, 0]
        return
    for slot, first in enumerate(start):
        kept = max(0, min(width, capacity - int(first)))
        cache[slot, :, first : first + kept] = stored[slot, :, :kept]


def attend(
    q: Float32,
    keys: Float32,
    values: Float32,
    first: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float32 | None = None,
    tree: SlotTree | None = None,
) -> Float32:
    """Compute causal attention of one slot: new token i sees the keys j <= first + i, in a sliding window only the last of them.

    Scores of other keys get -inf, so a NaN there still reaches the result, as on a device. ``sinks [Hq]``: other logits, without values.
    """
    width, query_heads, head_dim = q.shape
    kv_heads, rows, _ = keys.shape
    grouped = q.reshape(width, kv_heads, query_heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    result = np.empty_like(grouped)
    sees_all = width == 1 and rows == first + 1 and (window is None or rows <= window)
    for begin in range(0, width, _QUERY_BLOCK):
        block = slice(begin, min(begin + _QUERY_BLOCK, width))
        scores = grouped[:, :, block] @ keys[:, None].swapaxes(-1, -2)
        if softcap is not None:
            scores = softcapped(scores, softcap)
        if not sees_all:
            seen = _seen_keys(block, rows, first, window, tree)
            scores += np.where(seen, np.float32(0), np.float32(-np.inf))
        if sinks is None:
            weights = softmax(scores)
        else:
            of_heads = np.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*scores.shape[:3], 1))
            weights = softmax(np.concatenate((scores, of_heads), axis=-1))[..., :-1]
        result[:, :, block] = weights @ values[:, None]
    ungrouped: Float32 = result.transpose(2, 0, 1, 3).reshape(q.shape)
    return ungrouped


def _seen_keys(block: slice, rows: int, first: int, window: int | None, tree: SlotTree | None) -> npt.NDArray[np.bool_]:
    """Return the keys ``[block, rows]`` that a block of new tokens sees: of a tree ancestors and itself. Windows are of positions."""
    queries, keys = first + np.arange(block.start, block.stop), np.arange(rows)
    if tree is not None:
        new = slice(first, min(first + len(tree.depths), rows))
        stored = new.stop - first
        queries, keys[new] = first + tree.depths[block], first + tree.depths[:stored]
    distance = queries[:, None] - keys
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if tree is not None:
        seen[:, new] &= tree.sees[block, :stored]
    return seen


def apply_rope(x: Float32, angles: Angles) -> Float32:
    """Apply RoPE in a new array: rotate the pairs (d, d + rotary_dim / 2) of a head; elements from rotary_dim on are copied."""
    cos, sin = angles
    half = cos.shape[-1]
    low, high, rest = np.split(x, (half, 2 * half), axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin, rest), axis=-1)


def softcapped(x: Float32, softcap: float) -> Float32:
    """Return ``softcap * tanh(x / softcap)``."""
    capped: Float32 = np.float32(softcap) * np.tanh(x / np.float32(softcap))
    return capped


def softmax(scores: Float32) -> Float32:
    """Return the softmax over the last axis, without overflow for large scores."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights: Float32 = powers / powers.sum(axis=-1, keepdims=True)
    return weights
