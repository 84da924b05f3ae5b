"""``HybridCacheManager`` (seed 003): one cache for a decoder of attention and Mamba layers."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.cache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.cache.hybrid_config import HybridCacheConfig, LayerType
from trt_kvcache.cache.kv_cache_manager import KVCacheManager
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.mamba_cache_manager import MambaCacheManager
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.errors import ConfigError, LayerIndexError, ShapeError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class HybridCacheManager(RecurrentCache):
    """Caches by absolute decoder-layer index, over one set of slots and lengths. Not thread-safe.

    ``HybridCacheManager`` of TensorRT Edge-LLM (seed 003). The managers inside share its lengths, so what is done to slots
    is done to all that they hold, whichever manager is asked. They close with it.

    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`.
    """

    def __init__(self, config: HybridCacheConfig, *, memory: Memory) -> None:
        if not isinstance(config, HybridCacheConfig):
            raise ConfigError(f"HybridCacheManager: expected a HybridCacheConfig, got {type(config).__name__}.")
        self._config = config
        super().__init__(config.max_batch_size, config.max_sequence_length, memory=memory)

    def _allocate_contents(self, stream: Any) -> None:
        self._kv_manager: KVCacheManager | None = None
        self._mamba_manager: MambaCacheManager | None = None
        if self._config.kv is not None:
            self._kv_manager = self._own(KVCacheManager(self._config.kv, memory=self._memory, lengths=self._lengths))
        if self._config.mamba is not None:
            self._mamba_manager = self._own(MambaCacheManager(self._config.mamba, memory=self._memory, lengths=self._lengths))
            self._states = self._mamba_manager.states

    @property
    def config(self) -> HybridCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def kv_config(self) -> KVCacheConfig | None:
        """The attention layers, in their order; None where there are none."""
        return self._config.kv

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """What each decoder layer is."""
        return self._config.layer_types

    @property
    def num_layers(self) -> int:
        """Decoder layers of both kinds."""
        return self._config.num_layers

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states as allocated, padding and scales included; lengths and infos for kernels are not in it."""
        return self._config.nbytes

    @property
    def kv_cache_manager(self) -> KVCacheManager | None:
        """The manager of the attention layers, by their own index; None where there are none."""
        self._check_open()
        return self._kv_manager

    @property
    def mamba_cache_manager(self) -> MambaCacheManager | None:
        """The manager of the Mamba layers, by their own index; None where there are none."""
        self._check_open()
        return self._mamba_manager

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The attention layers by head dim, as kernels take them: one group if all have the same."""
        self._check_open()
        return () if self._kv_manager is None else self._kv_manager.kv_head_dim_groups

    @property
    def kv_scales(self) -> DeviceTensor | None:
        """K and V scale of each attention layer, float32 ``[L, 2]``; None for a dtype without scales."""
        self._check_open()
        return None if self._kv_manager is None else self._kv_manager.kv_scales

    def get_layer_config(self, layer_idx: int) -> KVLayerConfig:
        """Return the heads of an attention layer. Raises :class:`LayerIndexError` for another layer."""
        manager, index = self._attention(layer_idx)
        return manager.get_layer_config(index)

    def get_combined_kv_cache(self, layer_idx: int) -> DeviceTensor:
        """Return K and V of an attention layer as one view: see :class:`~trt_kvcache.cache.kv_cache_base.KVCacheBase`.

        ``layer_idx`` counts all decoder layers, from 0. Raises :class:`LayerIndexError` out of range, and for another kind of layer.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_combined_kv_cache(index)

    def get_separate_kv_cache(self, layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of an attention layer as two views ``[B, H, S, D]``.

        They are dense in the SEPARATE layout, strided in the COMBINED one. Arguments and errors are those of
        :meth:`get_combined_kv_cache`.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_separate_kv_cache(index)

    def get_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current recurrent state of a Mamba layer ``[B, num_heads, head_dim, state_size]``: what the next enqueue reads.

        ``layer_idx`` counts all decoder layers, from 0. Raises :class:`LayerIndexError` out of range, and for another kind of layer.
        """
        return super().get_recurrent_state(self._index(layer_idx, LayerType.MAMBA))

    def get_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current conv state of a Mamba layer ``[B, conv_dim, conv_kernel]``: as :meth:`get_recurrent_state`."""
        return super().get_conv_state(self._index(layer_idx, LayerType.MAMBA))

    def get_next_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the recurrent state of a Mamba layer that the next enqueue writes: without ``ping_pong`` the current one."""
        return super().get_next_recurrent_state(self._index(layer_idx, LayerType.MAMBA))

    def get_next_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the conv state of a Mamba layer that the next enqueue writes: without ``ping_pong`` the current one."""
        return super().get_next_conv_state(self._index(layer_idx, LayerType.MAMBA))

    def _index(self, layer_idx: int, layer_type: LayerType) -> int:
        self._check_open()
        index = layer_index(layer_idx, self.num_layers, name="layer_idx")
        if self.layer_types[index] is not layer_type:
            raise LayerIndexError(f"layer_idx {index}: expected a layer of kind {layer_type.value}, got {self.layer_types[index].value}.")
        return self._config.indices_in_kind[index]

    def _attention(self, layer_idx: int) -> tuple[KVCacheManager, int]:
        index = self._index(layer_idx, LayerType.ATTENTION)
        assert self._kv_manager is not None  # it has this layer
        return self._kv_manager, index

    def capture_kv_cache(self, slot: int, sequence_length: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the first tokens of a slot into new tensors, one per attention layer.

        See :meth:`KVCacheManager.capture_kv_cache <trt_kvcache.cache.kv_cache_base.KVCacheBase.capture_kv_cache>`.
        """
        self._check_open()
        if self._kv_manager is not None:
            return self._kv_manager.capture_kv_cache(slot, sequence_length, stream=stream)
        slot_index(slot, self.max_batch_size)
        int_in_range("sequence_length", sequence_length, 0, self._config.max_sequence_length)
        refuse_capture(self._memory, "capture_kv_cache", stream)
        return []

    def restore_kv_cache(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured tokens to the front of a slot. Lengths and states stay as they are.

        See :meth:`KVCacheManager.restore_kv_cache <trt_kvcache.cache.kv_cache_base.KVCacheBase.restore_kv_cache>`.
        """
        self._check_open()
        if self._kv_manager is not None:
            self._kv_manager.restore_kv_cache(saved, slot, stream=stream)
            return
        slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, "restore_kv_cache", stream)
        if saved:
            raise ShapeError(f"saved: expected no tensor, as there is no attention layer, got {len(saved)}.")
