"""``CacheTraffic``: bytes that a decode step reads and writes in the cache of a slot."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.cache.config import DecoderCacheConfig
from trt_kvcache.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class CacheTraffic:
    """Bytes of the cache of one slot that a decode step needs.

    Parameters
    ----------
    rows : tuple of (int, int or None)
        For each window size: bytes of K and V of one token in all layers with this window, including scales, and the window; None for
        full attention.
    states_nbytes : int
        States of all layers, read once and written once.

    Examples
    --------
    Layers that keep 10 bytes a token, and others that keep 40 and look at the last 100 tokens:

    >>> from trt_kvcache.benchmarking import CacheTraffic
    >>> traffic = CacheTraffic(rows=((10, None), (40, 100)), states_nbytes=0)
    >>> traffic.nbytes(50), traffic.nbytes(1000)
    (2500, 14000)
    """

    rows: tuple[tuple[int, int | None], ...]
    states_nbytes: int

    @classmethod
    def of(cls, config: DecoderCacheConfig, model: ModelConfig | None = None) -> CacheTraffic:
        """Return the traffic of decode steps for a cache.

        Parameters
        ----------
        config : KVCacheConfig or HybridCacheConfig
            The cache.
        model : ModelConfig, optional
            Has the windows of the layers. Without it every layer reads all tokens.

        Returns
        -------
        CacheTraffic
            Sums over the layers.
        """
        layers = () if config.kv is None else config.kv.layers
        scaled = config.kv is not None and config.kv.scales_by_token
        windows = [None] * len(layers) if model is None else [mixer.window for mixer in model.attention_layers]
        read = range(len(layers)) if model is None else model.kv_of_attention
        rows: dict[int | None, int] = {}
        for place, window in zip(read, windows, strict=True):
            layer = layers[place]
            rows[window] = rows.get(window, 0) + layer.token_nbytes(config.dtype, scaled=scaled)
        states = 0 if config.mamba is None else config.mamba.slot_nbytes // config.mamba.num_buffers
        return cls(rows=tuple((nbytes, window) for window, nbytes in rows.items()), states_nbytes=2 * states)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a step.

        Parameters
        ----------
        tokens : int
            Tokens in the slot, including the new one.

        Returns
        -------
        int
            Bytes of K and V inside the windows, and of the states.
        """
        return sum(nbytes * (tokens if window is None else min(tokens, window)) for nbytes, window in self.rows) + self.states_nbytes
