"""``HybridCacheManager`` (seed 003): one cache for a decoder of attention and Mamba layers."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.hybrid_config import HybridCacheConfig, LayerType
from trt_kvcache.cache.kv_cache_manager import KVCacheManager
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.kv_layer_config import KVLayerConfig
from trt_kvcache.cache.mamba_cache_manager import MambaCacheManager
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.errors import ConfigError, LayerIndexError, ShapeError
from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class HybridCacheManager(RecurrentCache):
    """One cache for attention and Mamba layers, addressed by absolute decoder-layer index. Not thread-safe.

    It holds a :class:`KVCacheManager` and a :class:`MambaCacheManager` that share its lengths, so what is done to a slot is done
    to everything that the slot holds, whichever manager was asked. They close with it.

    Parameters
    ----------
    config : HybridCacheConfig
        Which layer is of which kind, and the cache of each kind.
    memory : Memory
        Where it is allocated: ``HostMemory`` or ``CudaMemory``. The constructor waits for that.

    Raises
    ------
    ConfigError
        ``config`` is of another class.
    CapacityError
        An allocation failed. Those made before were released.

    Notes
    -----
    ``HybridCacheManager`` of TensorRT Edge-LLM (seed 003). What all managers can do is described at
    :class:`~trt_kvcache.cache.slot_cache.SlotCache`, and the operations on states at
    :class:`~trt_kvcache.cache.recurrent_cache.RecurrentCache`; here ``layer_idx`` counts decoder layers of both kinds.

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

    def __init__(self, config: HybridCacheConfig, *, memory: Memory) -> None:
        if not isinstance(config, HybridCacheConfig):
            raise ConfigError(f"HybridCacheManager: expected a HybridCacheConfig, got {type(config).__name__}.")
        super().__init__(config.max_batch_size, config.max_sequence_length, memory=memory)
        self._config = config
        self._kv_manager: KVCacheManager | None = None
        self._mamba_manager: MambaCacheManager | None = None
        with self._allocating():
            if config.kv is not None:
                self._kv_manager = self._resources.add(KVCacheManager(config.kv, memory=memory, lengths=self._lengths))
            if config.mamba is not None:
                self._mamba_manager = self._resources.add(MambaCacheManager(config.mamba, memory=memory, lengths=self._lengths))
                self._states = self._mamba_manager.states

    @property
    def config(self) -> HybridCacheConfig:
        """The configuration it was made with."""
        return self._config

    @property
    def kv_config(self) -> KVCacheConfig | None:
        """The attention layers, in their order; None if there are none."""
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
        """Bytes of K, V and states as allocated, padding and scales included; lengths and infos for kernels are not counted."""
        return self._config.nbytes

    @property
    def kv_cache_manager(self) -> KVCacheManager | None:
        """The manager of the attention layers, by their own index; None if there are none."""
        self._check_open()
        return self._kv_manager

    @property
    def mamba_cache_manager(self) -> MambaCacheManager | None:
        """The manager of the Mamba layers, by their own index; None if there are none."""
        self._check_open()
        return self._mamba_manager

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The attention layers by head dim, as kernels take them: one group if all have the same."""
        self._check_open()
        return () if self._kv_manager is None else self._kv_manager.kv_head_dim_groups

    @property
    def kv_scale_rows(self) -> KVLayerInfos | None:
        """The scales by token of all attention layers, in rows of four tokens, as kernels move them; None without such scales."""
        self._check_open()
        return None if self._kv_manager is None else self._kv_manager.kv_scale_rows

    def get_layer_config(self, layer_idx: int) -> KVLayerConfig:
        """Return the heads of an attention layer.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        KVLayerConfig
            Its heads, head dim and scales.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is a Mamba layer.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_layer_config(index)

    def get_combined_kv_cache(self, layer_idx: int) -> DeviceTensor:
        """Return K and V of an attention layer as one view.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Contiguous in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is a Mamba layer.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_combined_kv_cache(index)

    def get_separate_kv_cache(self, layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of an attention layer as two views.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            K, then V. Contiguous in the SEPARATE layout; strided views of the same bytes in the COMBINED one.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is a Mamba layer.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_separate_kv_cache(index)

    def get_kv_scales(self, layer_idx: int) -> DeviceTensor | None:
        """Return the scales of an attention layer.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[2, H]`` or ``[B, 2, H, S']`` float32, or None
            As of :meth:`KVCacheBase.get_kv_scales <trt_kvcache.cache.kv_cache_base.KVCacheBase.get_kv_scales>`.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is a Mamba layer.
        """
        manager, index = self._attention(layer_idx)
        return manager.get_kv_scales(index)

    def get_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current recurrent state of a Mamba layer, which the next enqueue reads.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        ConfigError
            The layers keep a conv state only.
        """
        return super().get_recurrent_state(self._index(layer_idx, LayerType.MAMBA))

    def get_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the current conv state of a Mamba layer, which the next enqueue reads.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        """
        return super().get_conv_state(self._index(layer_idx, LayerType.MAMBA))

    def get_next_recurrent_state(self, layer_idx: int) -> DeviceTensor:
        """Return the recurrent state of a Mamba layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, num_heads, head_dim, state_size]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        ConfigError
            The layers keep a conv state only.
        """
        return super().get_next_recurrent_state(self._index(layer_idx, LayerType.MAMBA))

    def get_next_conv_state(self, layer_idx: int) -> DeviceTensor:
        """Return the conv state of a Mamba layer that the next enqueue writes; without ``ping_pong`` it is the current one.

        Parameters
        ----------
        layer_idx : int
            Index among all decoder layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, conv_dim, conv_kernel]``
            Contiguous.

        Raises
        ------
        LayerIndexError
            There is no such layer, or it is an attention layer.
        """
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
        """Copy the first tokens of a slot into new tensors. This allocates.

        Parameters
        ----------
        slot : int
            Any slot, active or not.
        sequence_length : int
            Tokens, ``0 <= n <= S``.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group; the call does not wait.

        Returns
        -------
        list of DeviceTensor ``[2, H_i, n, D_i]``
            One per attention layer, as of :meth:`KVCacheBase.capture_kv_cache
            <trt_kvcache.cache.kv_cache_base.KVCacheBase.capture_kv_cache>`; empty if there is none.

        Raises
        ------
        SlotError, RangeError
            There is no such slot, or a slot cannot hold so many tokens.
        CapacityError
            The memory has no room for the copy.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``captureKVCache`` of seed 003.
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

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[2, H_i, n, D_i]``
            What ``capture_kv_cache`` returned. The tensors must stay open until the copies are done.
        slot : int
            Any slot, active or not.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group; the call neither waits nor allocates.

        Raises
        ------
        SlotError
            There is no such slot.
        ShapeError, DTypeError, PlaceError, LayoutError, ClosedError
            The tensors do not fit the layers, are not contiguous, or are closed.
        CaptureError
            The stream is capturing.

        Notes
        -----
        ``restoreKVCache`` of seed 003.
        """
        self._check_open()
        if self._kv_manager is not None:
            self._kv_manager.restore_kv_cache(saved, slot, stream=stream)
            return
        slot_index(slot, self.max_batch_size)
        refuse_capture(self._memory, "restore_kv_cache", stream)
        if saved:
            raise ShapeError(f"saved: expected no tensor, as there is no attention layer, got {len(saved)}.")
