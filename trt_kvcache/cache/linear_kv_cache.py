"""``LinearKVCache`` (seed 001): all attention layers in one buffer, and the states of recurrent layers."""

from trt_kvcache.cache.config import CacheConfig
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.kv_layers import LayerPlace
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor


class LinearKVCache(KVCacheBase, RecurrentCache):
    """K/V cache of equal layers in one allocation, with the states of recurrent layers if there are any. Not thread-safe.

    Parameters
    ----------
    config : CacheConfig
        The layers of both kinds, sizes, dtypes and layout.
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
    ``LinearKVCache`` of TensorRT Edge-LLM (seed 001). The buffer is ``[L, B, 2, H, S, D]`` in the COMBINED layout and
    ``[L, 2, B, H, S, D]`` in the SEPARATE one; K, V and layers start at multiples of 256 bytes. Layers of each kind have their
    own indices from 0; the seed's "SSM state" is the recurrent state. What all managers can do is described at
    :class:`~trt_kvcache.cache.slot_cache.SlotCache`.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig, HostMemory, LinearKVCache
    >>> config = CacheConfig(num_attention_layers=2, max_batch_size=4, max_sequence_length=256, num_kv_heads=2, head_dim=64)
    >>> with LinearKVCache(config, memory=HostMemory()) as cache:
    ...     cache.kv_cache_buffer
    DeviceTensor((2, 2, 4, 2, 256, 64), float16, cpu)
    """

    def __init__(self, config: CacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, CacheConfig):
            raise ConfigError(f"LinearKVCache: expected a CacheConfig, got {type(config).__name__}.")
        super().__init__(config.kv, memory=memory, lengths=lengths)
        self._config = config
        layer_nbytes = config.kv.storages[0].nbytes
        with self._allocating() as stream:
            self._buffer = self._resources.allocate(self.num_layers * layer_nbytes, stream=stream)
            self._set_layers([LayerPlace(self._buffer, index * layer_nbytes) for index in range(self.num_layers)], stream)
            if config.mamba is not None:
                self._set_states(config.mamba, stream)

    @property
    def config(self) -> CacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states as allocated, padding and scales included; lengths and infos for kernels are not counted."""
        return self._config.nbytes

    @property
    def kv_cache_buffer(self) -> DeviceTensor:
        """The whole buffer: ``[L, B, 2, H, S, D]`` (COMBINED) or ``[L, 2, B, H, S, D]`` (SEPARATE), with padded outer strides."""
        self._check_open()
        storage = self._kv.storages[0]
        layer_stride = storage.nbytes // itemsize(storage.dtype)
        outer = {
            KVLayout.COMBINED: ((storage.max_batch_size, storage.slot_stride), (2, storage.kv_stride)),
            KVLayout.SEPARATE: ((2, storage.kv_stride), (storage.max_batch_size, storage.slot_stride)),
        }[storage.layout]
        sizes, strides = zip(*outer, strict=True)
        return DeviceTensor(
            self._buffer,
            shape=(self.num_layers, *sizes, *storage.head_shape),
            dtype=storage.dtype,
            strides=(layer_stride, *strides, *storage.head_strides),
        )

    get_combined_kv_cache_for_decoder_layer = KVCacheBase.get_combined_kv_cache
    get_separate_kv_cache_for_decoder_layer = KVCacheBase.get_separate_kv_cache
    get_ssm_state_for_layer = RecurrentCache.get_recurrent_state
    get_conv_state_for_layer = RecurrentCache.get_conv_state
    capture_ssm_states = RecurrentCache.capture_recurrent_states
