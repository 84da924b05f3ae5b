"""``live_rows``: copies the live rows of K and V (the first ``length`` of each active slot) and the states of a cache to the host."""

from itertools import count
from typing import Any

import numpy as np

from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import LayerType
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.kernels.attention_params import HEAD_SCALES_NDIM
from trt_kvcache.memory.tensor import DeviceTensor

#: Name of the lengths among the arrays of :func:`live_rows`.
LENGTHS = "kvcache_lengths"


def rows_names(layer: int) -> tuple[str, str]:
    """Return the names of K and V of one attention layer among the arrays of :func:`live_rows`."""
    return DEFAULT_NAMES.k_cache.format(i=layer), DEFAULT_NAMES.v_cache.format(i=layer)


def state_name(kind: StateKind, layer: int) -> str:
    """Return the name of a state among the arrays of :func:`live_rows`."""
    return DEFAULT_NAMES.state_pair(kind, layer)[0]


def live_rows(cache: Cache) -> dict[str, np.ndarray[Any, Any]]:
    """Copy live rows and states to the host, in the order of the layers if the cache knows it. Waits for all work of the device."""
    # k_cache_{i}, v_cache_{i}: float32 [A, H, n, D], n = longest length; rows past a length are 0, quantized rows are dequantized.
    # conv_state_{i}: float32 [A, channels, kernel], recurrent_state_{i}: float32 [A, heads, head_dim, state_size]: inputs of the next
    # enqueue; 0 for a slot of length 0. kvcache_lengths: int32 [A].
    lengths = np.array(cache.host_kv_cache_lengths, np.int32)
    dead = np.arange(lengths.max(initial=0)) >= lengths[:, np.newaxis]
    rows: dict[str, np.ndarray[Any, Any]] = {}
    indices = {kind: count() for kind in LayerType}
    for kind in cache.layer_types:
        layer = next(indices[kind])
        rows |= _attention_rows(cache, layer, dead) if kind is LayerType.ATTENTION else _states(cache, layer, lengths)
    rows[LENGTHS] = lengths
    return rows


def _attention_rows(cache: Cache, layer: int, dead: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    kv = cache.kv_layers
    assert kv is not None  # it has an attention layer
    rows = {name: _read(view, dead) for name, view in zip(rows_names(layer), kv.separate[layer], strict=True)}
    if kv.scales:
        for values, found in zip(rows.values(), _scales(kv.scales[layer], dead), strict=True):
            values *= np.where(dead[:, np.newaxis], np.float32(0), found)[..., np.newaxis]
    return rows


def _scales(scales: DeviceTensor, dead: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the scales of K and of V, which broadcast to ``[A, H, n]``."""
    slots, longest = dead.shape
    found = scales.numpy()
    if found.ndim == HEAD_SCALES_NDIM:
        return found[0][:, np.newaxis], found[1][:, np.newaxis]
    return found[:slots, 0, :, :longest], found[:slots, 1, :, :longest]


def _states(cache: Cache, layer: int, lengths: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the states of a layer; 0 for slots without tokens."""
    states = cache.states
    assert states is not None  # it has a layer with states
    found = {}
    for kind in reversed(states.kinds):  # in the order of computation: first the convolution
        values = states.current(kind).layers[layer].numpy()[: len(lengths)].astype(np.float32)
        values[lengths == 0] = 0
        found[state_name(kind, layer)] = values
    return found


def _read(view: DeviceTensor, dead: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the rows of a ``[B, H, S, D]`` view that ``dead`` ``[A, n]`` spans, with the dead ones set to 0."""
    slots, longest = dead.shape
    _, heads, _, head_dim = view.shape
    part = DeviceTensor(
        view.allocation, shape=(slots, heads, longest, head_dim), dtype=view.dtype, strides=view.strides, offset=view.offset
    )
    rows = part.numpy().astype(np.float32)
    rows.swapaxes(1, 2)[dead] = 0
    return rows
