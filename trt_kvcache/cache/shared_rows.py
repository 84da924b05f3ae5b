"""``SharedRows``: a cache over K and V of another one, to be read, with lengths of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_layers import KVLayers
from trt_kvcache.cache.slot_contents import SlotContents


class SharedRows(Cache):
    """K and V of some layers of another cache, at their addresses, and in its slots. Nothing here moves, copies or clears them."""

    def __init__(self, cache: Cache, layers: Sequence[int]) -> None:
        assert cache.kv_layers is not None
        self._source, self._layers = cache.kv_layers, tuple(layers)
        super().__init__(shared_config(cache, layers), memory=cache.memory)

    def _allocate(self, stream: Any) -> list[SlotContents]:
        self._kv = _SharedLayers(self._source, self._layers)
        return []

    @property
    def nbytes(self) -> int:
        """No bytes of its own."""
        return 0


def shared_config(cache: Cache, layers: Sequence[int]) -> KVCacheConfig:
    """Return the configuration of :class:`SharedRows`."""
    config = cache.kv_config
    assert config is not None
    return replace(config, layers=tuple(config.layers[layer] for layer in layers))


class _SharedLayers(KVLayers):
    """Views of some layers. ``infos`` are empty: what moves rows of all layers moves none of these."""

    def __init__(self, source: KVLayers, layers: Sequence[int]) -> None:
        self.config = replace(source.config, layers=tuple(source.config.layers[layer] for layer in layers))
        self.combined = tuple(source.combined[layer] for layer in layers)
        self.separate = tuple(source.separate[layer] for layer in layers)
        self.scales = tuple(source.scales[layer] for layer in layers) if source.scales else ()
        self.scale_rows = source.scale_rows
        self.groups, self.infos = (), ()
