"""``KVCacheManager`` (seed 000): one allocation per attention layer, so that layers may differ in their heads."""

from typing import Any

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Allocation, Memory


class KVCacheManager(KVCacheBase):
    """K/V cache with a head configuration and an allocation per attention layer. Not thread-safe.

    ``KVCacheManager`` of TensorRT Edge-LLM (seed 000). Each layer is ``[B, 2, H_i, S, D_i]`` in the COMBINED layout and
    ``[2, B, H_i, S, D_i]`` in the SEPARATE one.

    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`.
    """

    def __init__(self, config: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, KVCacheConfig):
            raise ConfigError(f"KVCacheManager: expected a KVCacheConfig, got {type(config).__name__}.")
        super().__init__(config, memory=memory, lengths=lengths)

    @property
    def config(self) -> KVCacheConfig:
        """The configuration it was made with."""
        return self._kv

    def _allocate_layers(self, stream: Any) -> list[tuple[Allocation, int]]:
        return [(self._allocate(storage.nbytes, stream), 0) for storage in self._kv.storages]
