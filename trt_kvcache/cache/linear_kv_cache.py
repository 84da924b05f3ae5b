"""``LinearKVCache`` (seed 001): all attention layers in one buffer, and the states of recurrent layers."""

from typing import Any

from trt_kvcache.cache.config import CacheConfig
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.tensor import DeviceTensor


class LinearKVCache(KVCacheBase, RecurrentCache):
    """K/V cache of equal layers in one allocation, with the states of recurrent layers if there are any. Not thread-safe.

    ``LinearKVCache`` of TensorRT Edge-LLM (seed 001). The buffer is ``[L, B, 2, H, S, D]`` in the COMBINED layout and
    ``[L, 2, B, H, S, D]`` in the SEPARATE one; K, V and layers start at multiples of 256 bytes. Layers of each kind are counted
    for themselves; the seed's "SSM state" is the recurrent state.

    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`.
    """

    def __init__(self, config: CacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        if not isinstance(config, CacheConfig):
            raise ConfigError(f"LinearKVCache: expected a CacheConfig, got {type(config).__name__}.")
        self._config = config
        super().__init__(config.kv, memory=memory, lengths=lengths)

    @property
    def config(self) -> CacheConfig:
        """The configuration it was made with."""
        return self._config

    def _allocate_layers(self, stream: Any) -> list[tuple[Allocation, int]]:
        layer_nbytes = self._kv.storages[0].nbytes
        buffer = self._allocate(self.num_layers * layer_nbytes, stream)
        return [(buffer, index * layer_nbytes) for index in range(self.num_layers)]

    def _allocate_contents(self, stream: Any) -> None:
        super()._allocate_contents(stream)
        self._allocate_states(self._config.mamba, stream)

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states as allocated, padding and scales included; lengths and infos for kernels are not in it."""
        return self._config.nbytes

    @property
    def kv_cache_buffer(self) -> DeviceTensor:
        """The whole buffer: ``[L, B, 2, H, S, D]`` (COMBINED) or ``[L, 2, B, H, S, D]`` (SEPARATE), outer strides padded."""
        self._check_open()
        storage = self._kv.storages[0]
        buffer, _ = self._layers[0]
        layer_stride = storage.nbytes // itemsize(storage.dtype)
        outer = {
            KVLayout.COMBINED: ((storage.max_batch_size, storage.slot_stride), (2, storage.kv_stride)),
            KVLayout.SEPARATE: ((2, storage.kv_stride), (storage.max_batch_size, storage.slot_stride)),
        }[storage.layout]
        sizes, strides = zip(*outer, strict=True)
        return DeviceTensor(
            buffer,
            shape=(self.num_layers, *sizes, *storage.head_shape),
            dtype=storage.dtype,
            strides=(layer_stride, *strides, *storage.head_strides),
        )

    get_combined_kv_cache_for_decoder_layer = KVCacheBase.get_combined_kv_cache
    get_separate_kv_cache_for_decoder_layer = KVCacheBase.get_separate_kv_cache
    get_ssm_state_for_layer = RecurrentCache.get_recurrent_state
    get_conv_state_for_layer = RecurrentCache.get_conv_state
    capture_ssm_states = RecurrentCache.capture_recurrent_states
