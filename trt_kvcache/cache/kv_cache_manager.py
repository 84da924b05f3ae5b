"""``KVCacheManager`` (seed 000): one allocation per attention layer, so that layers may differ in their heads."""

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.kv_layers import LayerPlace
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory


class KVCacheManager(KVCacheBase):
    """K/V cache with a head configuration and an allocation per attention layer. Not thread-safe.

    Parameters
    ----------
    config : KVCacheConfig
        The layers, sizes, dtype and layout.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.
    lengths : Lengths, optional
        Lengths that are shared with other managers. Without, it makes its own.

    Raises
    ------
    ConfigError, PlaceError
        ``config`` is of another class, or ``lengths`` have other sizes or are in another memory.
    CapacityError
        An allocation failed. Those made before were released.

    Notes
    -----
    ``KVCacheManager`` of TensorRT Edge-LLM (seed 000). Each layer is ``[B, 2, H_i, S, D_i]`` in the COMBINED layout and
    ``[2, B, H_i, S, D_i]`` in the SEPARATE one. What all managers can do is described at
    :class:`~trt_kvcache.cache.slot_cache.SlotCache`.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig
    >>> layers = [KVLayerConfig(num_kv_heads=2, head_dim=64), KVLayerConfig(num_kv_heads=1, head_dim=128)]
    >>> config = KVCacheConfig(layers=layers, max_batch_size=4, max_sequence_length=256)
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> with KVCacheManager(config, memory=memory) as cache:
    ...     cache.reset_for_new_sequences([0, 5, 0], stream=stream)
    ...     cache.commit_sequence_length(7, stream=stream)
    ...     cache.compact_batch([0, -1, 1], 3, 2, stream=stream)
    ...     cache.host_kv_cache_lengths, cache.get_separate_kv_cache(1)[0].shape
    ((7, 7), (4, 1, 256, 128))
    """

    def __init__(self, config: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, KVCacheConfig):
            raise ConfigError(f"KVCacheManager: expected a KVCacheConfig, got {type(config).__name__}.")
        super().__init__(config, memory=memory, lengths=lengths)
        with self._allocating() as stream:
            places = [LayerPlace(self._resources.allocate(storage.nbytes, stream=stream), 0) for storage in config.storages]
            self._set_layers(places, stream)

    @property
    def config(self) -> KVCacheConfig:
        """The configuration it was made with."""
        return self._kv
