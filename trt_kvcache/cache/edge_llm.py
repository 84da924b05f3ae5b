"""The cache managers of TensorRT Edge-LLM, by the names of its C++ interfaces: thin classes over :class:`Cache`."""

from typing import Any

from trt_kvcache._util.checks import layer_index
from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.config import CacheConfig, DecoderCacheConfig, HybridCacheConfig, KVCacheConfig, LayerType, MambaCacheConfig
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.layout import KVLayout
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor


class _IndexedByType(Cache):
    """A cache whose getters count the layers of each type separately, from 0."""

    def _index(self, layer_idx: int, layer_type: LayerType) -> int:
        name = "attn_layer_idx" if layer_type is LayerType.ATTENTION else "recurrent_layer_idx"
        return layer_index(layer_idx, self.layer_types.count(layer_type), name=name)

    def get_layer_config(self, attn_layer_idx: int) -> KVLayerConfig:
        """Return the heads of an attention layer.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        KVLayerConfig
            Its heads, head dim and scales.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_layer_config(attn_layer_idx)

    def get_combined_kv_cache(self, attn_layer_idx: int) -> DeviceTensor:
        """Return K and V of an attention layer as one view.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Contiguous in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_combined_kv_cache(attn_layer_idx)

    def get_separate_kv_cache(self, attn_layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of an attention layer as two views.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            K, then V. Contiguous in the SEPARATE layout; strided views of the same bytes in the COMBINED one.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_separate_kv_cache(attn_layer_idx)

    def get_kv_scales(self, attn_layer_idx: int) -> DeviceTensor | None:
        """Return the scales of an attention layer: see :meth:`Cache.get_kv_scales <trt_kvcache.cache.cache.Cache.get_kv_scales>`.

        Parameters
        ----------
        attn_layer_idx : int
            Index among the attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[2, H]`` or ``[B, 2, H, S']`` float32, or None
            Static scales, scales by token, or None for a dtype without scales.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_kv_scales(attn_layer_idx)

    def get_recurrent_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the current recurrent state of a layer, which the next enqueue reads.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        ConfigError
            The layers keep a conv state only.
        """
        return super().get_recurrent_state(recurrent_layer_idx)

    def get_conv_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the current conv state of a layer, which the next enqueue reads.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_conv_state(recurrent_layer_idx)

    def get_next_recurrent_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the recurrent state of a layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        ConfigError
            The layers keep a conv state only.
        """
        return super().get_next_recurrent_state(recurrent_layer_idx)

    def get_next_conv_state(self, recurrent_layer_idx: int) -> DeviceTensor:
        """Return the conv state of a layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        recurrent_layer_idx : int
            Index among the recurrent layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer.
        """
        return super().get_next_conv_state(recurrent_layer_idx)


class KVCacheManager(_IndexedByType):
    """K and V of attention layers, each with its own heads and its own allocation. Not thread-safe.

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
        An allocation failed. Earlier ones were released.

    Notes
    -----
    ``KVCacheManager`` of TensorRT Edge-LLM. Each layer is ``[B, 2, H_i, S, D_i]`` in the COMBINED layout and ``[2, B, H_i, S, D_i]`` in
    the SEPARATE one. The operations of all managers are described at :class:`~trt_kvcache.cache.cache.Cache`.

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

    _config: KVCacheConfig

    def __init__(self, config: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        _check_config(self, config, KVCacheConfig)
        super().__init__(config, memory=memory, lengths=lengths)

    @property
    def config(self) -> KVCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def kv_config(self) -> KVCacheConfig:
        """The attention layers: the configuration itself."""
        return self._config


class LinearKVCache(_IndexedByType):
    """K and V of equal attention layers in one allocation, and the states of recurrent layers if there are any. Not thread-safe.

    Parameters
    ----------
    config : CacheConfig
        The layers of both types, sizes, dtypes and layout.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.
    lengths : Lengths, optional
        Lengths that are shared with other managers. Without, it makes its own.

    Raises
    ------
    ConfigError, PlaceError
        ``config`` is of another class, or ``lengths`` have other sizes or are in another memory.
    CapacityError
        An allocation failed. Earlier ones were released.

    Notes
    -----
    ``LinearKVCache`` of TensorRT Edge-LLM. The buffer is ``[L, B, 2, H, S, D]`` in the COMBINED layout and ``[L, 2, B, H, S, D]`` in the
    SEPARATE one; K, V and layers start at multiples of 256 bytes. Layers of each type have their own indices from 0. The "SSM state" of
    the C++ interface is the recurrent state. The operations of all managers are described at :class:`~trt_kvcache.cache.cache.Cache`.

    Examples
    --------
    >>> from trt_kvcache import CacheConfig, HostMemory, LinearKVCache
    >>> config = CacheConfig(num_attention_layers=2, max_batch_size=4, max_sequence_length=256, num_kv_heads=2, head_dim=64)
    >>> with LinearKVCache(config, memory=HostMemory()) as cache:
    ...     cache.kv_cache_buffer
    DeviceTensor((2, 2, 4, 2, 256, 64), float16, cpu)
    """

    _config: CacheConfig
    _kv_in_one_allocation = True

    def __init__(self, config: CacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        _check_config(self, config, CacheConfig)
        super().__init__(config, memory=memory, lengths=lengths)

    @property
    def config(self) -> CacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def kv_config(self) -> KVCacheConfig:
        """The attention layers, one by one."""
        return self._config.kv

    @property
    def num_layers(self) -> int:
        """Attention layers, L."""
        return self._config.num_attention_layers

    @property
    def kv_cache_buffer(self) -> DeviceTensor:
        """The whole buffer: ``[L, B, 2, H, S, D]`` (COMBINED) or ``[L, 2, B, H, S, D]`` (SEPARATE), with padded outer strides."""
        self._check_open()
        first, storage = self.get_combined_kv_cache(0), self._config.kv.storages[0]
        slots, sides = (storage.max_batch_size, storage.slot_stride), (2, storage.kv_stride)
        outer = (slots, sides) if storage.layout is KVLayout.COMBINED else (sides, slots)
        sizes, strides = zip(*outer, strict=True)
        return DeviceTensor(
            first.allocation,
            shape=(self.num_layers, *sizes, *storage.head_shape),
            dtype=storage.dtype,
            strides=(storage.nbytes // itemsize(storage.dtype), *strides, *storage.head_strides),
        )

    get_combined_kv_cache_for_decoder_layer = _IndexedByType.get_combined_kv_cache
    get_separate_kv_cache_for_decoder_layer = _IndexedByType.get_separate_kv_cache
    get_ssm_state_for_layer = _IndexedByType.get_recurrent_state
    get_conv_state_for_layer = _IndexedByType.get_conv_state
    capture_ssm_states = Cache.capture_recurrent_states


class MambaCacheManager(_IndexedByType):
    """Recurrent states ``[B, heads, head_dim, state]`` and conv states ``[B, conv_dim, conv_kernel]`` per layer. Not thread-safe.

    States are zero at the start, and again for slots that are reset to length 0, cleared, or newly active.

    Parameters
    ----------
    config : MambaCacheConfig
        The layers, sizes and dtypes.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.
    lengths : Lengths, optional
        Lengths that are shared with another manager, of any ``max_sequence_length``. Without, it makes its own, as long as ``config`` says.

    Raises
    ------
    ConfigError, PlaceError
        ``config`` is of another class, or ``lengths`` have another batch size or are in another memory.
    CapacityError
        An allocation failed. Earlier ones were released.

    Notes
    -----
    ``MambaCacheManager`` of TensorRT Edge-LLM, the states of its ``HybridCacheManager``. The operations of all managers are described at
    :class:`~trt_kvcache.cache.cache.Cache`.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, MambaCacheConfig, MambaCacheManager
    >>> config = MambaCacheConfig(num_layers=1, max_batch_size=4, num_heads=8, head_dim=16, state_size=32, conv_dim=64, conv_kernel=4)
    >>> with MambaCacheManager(config, memory=HostMemory()) as cache:
    ...     cache.get_recurrent_state(0), cache.get_conv_state(0).shape
    (DeviceTensor((4, 8, 16, 32), float32, cpu), (4, 64, 4))
    """

    _config: MambaCacheConfig
    holds_whole_sequences = False

    def __init__(self, config: MambaCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        _check_config(self, config, MambaCacheConfig)
        super().__init__(config, memory=memory, lengths=lengths)

    @property
    def config(self) -> MambaCacheConfig:
        """The configuration it was made with."""
        return self._config

    clear = Cache.clear_mamba_states


class HybridCacheManager(Cache):
    """K, V and states of attention and recurrent layers, addressed by absolute decoder-layer index. Not thread-safe.

    It holds a :class:`KVCacheManager` and a :class:`MambaCacheManager` that share its lengths, so an operation on a slot acts on all
    that the slot holds, whichever manager is asked. They close with it.

    Parameters
    ----------
    config : HybridCacheConfig
        The type of each layer, and the cache of each type.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.

    Raises
    ------
    ConfigError
        ``config`` is of another class.
    CapacityError
        An allocation failed. Earlier ones were released.

    Notes
    -----
    ``HybridCacheManager`` of TensorRT Edge-LLM. The operations of all managers are described at :class:`~trt_kvcache.cache.cache.Cache`;
    ``layer_idx`` counts decoder layers of both types.

    Examples
    --------
    >>> from trt_kvcache import (
    ...     HostMemory, HybridCacheConfig, HybridCacheManager, KVCacheConfig, KVLayerConfig, LayerType, MambaCacheConfig
    ... )
    >>> kv = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=64)], max_batch_size=4, max_sequence_length=256)
    >>> mamba = MambaCacheConfig(num_layers=1, max_batch_size=4, num_heads=8, head_dim=16, state_size=32, conv_dim=64, conv_kernel=4)
    >>> config = HybridCacheConfig(layer_types=[LayerType.ATTENTION, LayerType.MAMBA], kv=kv, mamba=mamba)
    >>> with HybridCacheManager(config, memory=HostMemory()) as cache:
    ...     cache.get_combined_kv_cache(0).shape, cache.get_recurrent_state(1).shape
    ((4, 2, 2, 256, 64), (4, 8, 16, 32))
    """

    _config: HybridCacheConfig

    def __init__(self, config: HybridCacheConfig, *, memory: Memory) -> None:
        _check_config(self, config, HybridCacheConfig)
        self._kv_manager: KVCacheManager | None = None
        self._mamba_manager: MambaCacheManager | None = None
        super().__init__(config, memory=memory)

    def _allocate(self, stream: Any) -> list[SlotContents]:
        # The two managers allocate, and attach their contents to the lengths.
        shared: dict[str, Any] = {"memory": self._memory, "lengths": self._lengths}
        if self._config.kv is not None:
            self._kv_manager = self._resources.add(KVCacheManager(self._config.kv, **shared))
            self._kv = self._kv_manager.kv_layers
        if self._config.mamba is not None:
            self._mamba_manager = self._resources.add(MambaCacheManager(self._config.mamba, **shared))
            self._states = self._mamba_manager.states
        return []

    @property
    def config(self) -> HybridCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def kv_cache_manager(self) -> KVCacheManager | None:
        """The manager of the attention layers, by their own index; None if there are none."""
        self._check_open()
        return self._kv_manager

    @property
    def mamba_cache_manager(self) -> MambaCacheManager | None:
        """The manager of the recurrent layers, by their own index; None if there are none."""
        self._check_open()
        return self._mamba_manager


def _check_config(manager: Cache, config: object, expected: type) -> None:
    if not isinstance(config, expected):
        raise ConfigError(f"{type(manager).__name__}: expected a {expected.__name__}, got {type(config).__name__}.")


#: The manager that a user finds for a configuration.
_MANAGERS: dict[type, type[Any]] = {
    KVCacheConfig: KVCacheManager,
    CacheConfig: LinearKVCache,
    MambaCacheConfig: MambaCacheManager,
    HybridCacheConfig: HybridCacheManager,
}


def make_cache(config: DecoderCacheConfig, *, memory: Memory) -> Cache:
    """Allocate the manager of a configuration."""
    cache: Cache = _MANAGERS[type(config)](config, memory=memory)
    return cache
