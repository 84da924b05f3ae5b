"""``live_rows``: copy the live rows of a cache to the host, the first ``length`` rows of each active slot."""

from typing import Any

import numpy as np

from trt_kvcache.cache.hybrid_cache_manager import HybridCacheManager
from trt_kvcache.engine.names import DEFAULT_NAMES
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import AnyCache

#: Name of the lengths among the arrays of :func:`live_rows`.
LENGTHS = "kvcache_lengths"


def rows_names(layer: int) -> tuple[str, str]:
    """Return the names of K and V of one attention layer among the arrays of :func:`live_rows`.

    Parameters
    ----------
    layer : int
        Index among the attention layers.

    Returns
    -------
    pair of str
        The names of K and of V.
    """
    return DEFAULT_NAMES.k_cache.format(i=layer), DEFAULT_NAMES.v_cache.format(i=layer)


def live_rows(cache: AnyCache) -> dict[str, np.ndarray[Any, Any]]:
    """Copy the live rows of a cache to the host.

    Parameters
    ----------
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        A cache with separate or combined K and V. States are not read.

    Returns
    -------
    dict of str to ndarray
        ``k_cache_{i}`` and ``v_cache_{i}``: float32 ``[A, H, n, D]``, where n is the longest length; rows past the length of a slot are
        0, whatever the cache holds there. ``kvcache_lengths``: int32 ``[A]``.

    Raises
    ------
    LengthsUnknown
        The host does not know the exact lengths.
    ClosedError
        The cache is closed.

    Notes
    -----
    Waits for all work that was given to the device before the call.

    Examples
    --------
    >>> from trt_kvcache import InferenceSession
    >>> from trt_kvcache.polygraphy.live_rows import live_rows
    >>> with InferenceSession.from_model("examples/tiny-llama", engine="reference", max_batch_size=2) as session:
    ...     _ = session.prefill([[5, 6, 7], [8]])
    ...     rows = live_rows(session.cache)
    >>> rows["kvcache_lengths"].tolist()
    [3, 1]
    >>> rows["k_cache_0"].shape
    (2, 2, 3, 16)
    >>> bool(rows["k_cache_0"][1, :, 1:].any())  # slot 1 has one live row per head
    False
    """
    lengths = np.array(cache.host_kv_cache_lengths, np.int32)
    dead = np.arange(lengths.max(initial=0)) >= lengths[:, np.newaxis]
    rows: dict[str, np.ndarray[Any, Any]] = {}
    kv = cache.kv_cache_manager if isinstance(cache, HybridCacheManager) else cache
    for layer in range(0 if kv is None else kv.num_layers):
        for name, view in zip(rows_names(layer), kv.get_separate_kv_cache(layer) if kv else (), strict=True):
            rows[name] = _read(view, dead)
    rows[LENGTHS] = lengths
    return rows


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
