"""Attention of the reference engine: turn, write K and V of the new tokens into the cache, attend to it.

Everything is accumulated in float32, whatever the dtype of the cache. Shapes: A slots, s new tokens per slot, Hq query heads,
H key-value heads, S rows of cache per slot, D head_dim.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.engine.attention_variants import AttentionName
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.host import attention as twin
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.reference.weights import Float32

#: ``"native"`` reads the live rows of K and V, ``"mask"`` all rows under an additive mask, ``"plugin"`` the live rows of both in one.
Attention = AttentionName

#: Takes q ``[A, s, Hq, D]``, k and v ``[A, s, H, D]`` of the new tokens, neither turned nor scaled; returns ``[A, s, Hq, D]``.
LayerAttention = Callable[[Float32, Float32, Float32], Float32]

# Scores of this many query rows are held at a time.
_QUERY_BLOCK = 256


class SeparateAttention:
    """A step of one layer over K and V apart.

    Parameters
    ----------
    angles : pair of ndarray float32 ``[A, s, 1, D // 2]``
        Cosine and sine of the new tokens: :func:`angles_at`.
    k, v : ndarray ``[A, H, S, D]``
        Written in place and read back in their own dtype.
    start : ndarray int32 ``[A]``
        Tokens already in the cache, >= 0.
    masked : bool
        Read all rows.
    """

    def __init__(
        self, angles: tuple[Float32, Float32], k: npt.NDArray[Any], v: npt.NDArray[Any], start: npt.NDArray[np.int32], *, masked: bool
    ) -> None:
        self._angles = angles
        self._sides = k, v
        self._start = start
        self._masked = masked

    def __call__(self, q: Float32, k: Float32, v: Float32) -> Float32:
        """Run the step."""
        q, k = rotate(q, self._angles), rotate(k, self._angles)
        for side, rows in zip(self._sides, (k, v), strict=True):
            write_rows(side, rows, self._start)
        q = q * np.float32(q.shape[-1] ** -0.5)
        mixed = np.empty_like(q)
        capacity = self._sides[0].shape[2]
        for slot, first in enumerate(self._start.tolist()):
            rows = capacity if self._masked else min(first + q.shape[1], capacity)
            keys, values = (side[slot, :, :rows].astype(np.float32) for side in self._sides)
            mixed[slot] = attend(q[slot], keys, values, first)
        return mixed


class CombinedAttention:
    """A step of one layer over K and V in one tensor, by the NumPy form of the plugin's kernels: only K and V are rounded.

    Parameters
    ----------
    cos_sin : DeviceTensor ``[S, 2, D // 2]`` float32
        Cosine and sine of each position.
    cache : DeviceTensor ``[A, 2, H, S, D]``
        In host memory; written in place.
    start : DeviceTensor int32 ``[A]``
        Tokens already in the cache, >= 0.
    workspace : AttentionWorkspace
    stream : stream of the memory
    """

    def __init__(self, cos_sin: DeviceTensor, cache: DeviceTensor, start: DeviceTensor, workspace: AttentionWorkspace, stream: Any) -> None:
        self._cos_sin = cos_sin
        self._workspace = workspace
        self._cache = cache
        self._start = start
        self._stream = stream

    def __call__(self, q: Float32, k: Float32, v: Float32) -> Float32:
        """Run the step."""
        memory = self._cache.memory
        assert isinstance(memory, HostMemory)
        rows = [memory.to_device(part, stream=self._stream) for part in (q, k, v)]
        call = AttentionParams(
            q=rows[0],
            k=rows[1],
            v=rows[2],
            cache=self._cache,
            lengths=self._start,
            new_lengths=None,
            cos_sin=self._cos_sin,
            out=rows[0],
            scale=q.shape[-1] ** -0.5,
            window=0,
            softcap=0.0,
        )
        twin.attend(call, self._workspace, self._stream)
        mixed: Float32 = memory.array(rows[0])
        return mixed


def angles_at(rope: tuple[Float32, Float32], start: npt.NDArray[np.int32], width: int) -> tuple[Float32, Float32]:
    """Return cosine and sine ``[A, s, 1, D // 2]`` of the new tokens; positions past S, whose rows are dropped, get those of the last."""
    known = np.minimum(start[:, None] + np.arange(width), rope[0].shape[0] - 1)
    return rope[0][known][:, :, None], rope[1][known][:, :, None]


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
