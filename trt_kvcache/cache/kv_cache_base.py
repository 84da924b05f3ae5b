"""``KVCacheBase``: what the K/V caches of seeds 000 and 001 share. They differ in how many allocations hold the layers."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.cache.config import KVCacheConfig, KVLayerConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup, KVRows
from trt_kvcache.cache.layout import KVLayerStorage
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.cache.slot_cache import SlotCache
from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels import KVLayerInfos
from trt_kvcache.memory.base import Allocation, Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class KVCacheBase(SlotCache):
    """Views of a K/V cache, and rows captured and restored. Not thread-safe.

    Memory, shared lengths and errors: see :class:`~trt_kvcache.cache.slot_cache.SlotCache`.
    """

    def __init__(self, kv: KVCacheConfig, *, memory: Memory, lengths: Lengths | None = None) -> None:
        self._kv = kv
        super().__init__(kv.max_batch_size, kv.max_sequence_length, memory=memory, lengths=lengths)

    @abstractmethod
    def _allocate_layers(self, stream: Any) -> list[tuple[Allocation, int]]:
        """Return, per layer, the allocation that holds it and the byte at which it starts."""

    def _allocate_contents(self, stream: Any) -> None:
        self._layers = self._allocate_layers(stream)
        self._scales = self._allocate_scales(stream)
        self._rows = KVRows(self._kv, self._memory, self._make_groups(stream))
        self._contents.append(self._rows)

    def _allocate_scales(self, stream: Any) -> DeviceTensor | None:
        if not self._kv.has_scales:
            return None
        scales = np.array([(layer.k_scale, layer.v_scale) for layer in self._kv.layers], np.float32)
        tensor = DeviceTensor(self._allocate(self._kv.scales_nbytes, stream), shape=scales.shape, dtype="float32")
        self._memory.upload(tensor, scales, stream=stream)
        return tensor

    def _make_groups(self, stream: Any) -> list[KVHeadDimGroup]:
        head_dims = [layer.head_dim for layer in self._kv.layers]
        members = {head_dim: [index for index, other in enumerate(head_dims) if other == head_dim] for head_dim in head_dims}
        return [
            KVHeadDimGroup(self._own(KVLayerInfos([self._combined(index) for index in indices], stream=stream)), tuple(indices))
            for indices in members.values()
        ]

    @property
    def kv_config(self) -> KVCacheConfig:
        """The cache described layer by layer."""
        return self._kv

    @property
    def num_layers(self) -> int:
        """Attention layers, L."""
        return self._kv.num_layers

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same ``num_kv_heads`` and ``head_dim``."""
        return self._kv.is_uniform

    @property
    def nbytes(self) -> int:
        """Bytes of K and V as allocated, padding and scales included; lengths and layer infos are not in it."""
        return self._kv.nbytes

    @property
    def kv_head_dim_groups(self) -> tuple[KVHeadDimGroup, ...]:
        """The layers by head dim, as kernels take them: one group if all layers have the same."""
        self._check_open()
        return self._rows.groups

    def get_layer_config(self, attn_layer_idx: int) -> KVLayerConfig:
        """Return the heads of one attention layer. Raises :class:`LayerIndexError` out of range."""
        return self._kv.layers[layer_index(attn_layer_idx, self.num_layers)]

    def get_combined_kv_cache(self, attn_layer_idx: int) -> DeviceTensor:
        """Return K and V of one attention layer as one view. ``attn_layer_idx`` counts attention layers, from 0.

        Returns
        -------
        DeviceTensor ``[B, 2, H, S, D]``
            Dense in the COMBINED layout; a strided view of the same bytes in the SEPARATE one.
        """
        return self._combined(self._checked_layer(attn_layer_idx))

    def get_separate_kv_cache(self, attn_layer_idx: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return K and V of one attention layer as two views. ``attn_layer_idx`` counts attention layers, from 0.

        Returns
        -------
        pair of DeviceTensor ``[B, H, S, D]``
            Dense in the SEPARATE layout; strided views of the same bytes in the COMBINED one.
        """
        allocation, start, storage = self._layer(self._checked_layer(attn_layer_idx))
        k, v = (
            DeviceTensor(
                allocation,
                shape=storage.separate_shape,
                dtype=storage.dtype,
                strides=storage.separate_strides,
                offset=start + which * storage.kv_stride * itemsize(storage.dtype),
            )
            for which in (0, 1)
        )
        return k, v

    @property
    def kv_scales(self) -> DeviceTensor | None:
        """K and V scale of each layer, float32 ``[L, 2]``; None for a dtype without scales."""
        self._check_open()
        return self._scales

    def _checked_layer(self, attn_layer_idx: int) -> int:
        self._check_open()
        return layer_index(attn_layer_idx, self.num_layers)

    def _layer(self, index: int) -> tuple[Allocation, int, KVLayerStorage]:
        return (*self._layers[index], self._kv.storages[index])

    def _combined(self, index: int) -> DeviceTensor:
        allocation, start, storage = self._layer(index)
        return DeviceTensor(allocation, shape=storage.combined_shape, dtype=storage.dtype, strides=storage.combined_strides, offset=start)

    def capture_kv_cache(self, slot: int, sequence_length: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the first tokens of a slot into new tensors.

        ``captureKVCache`` of seed 003.

        Raises CapacityError.

        Parameters
        ----------
        sequence_length
            Tokens, ``0 <= n <= S``.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group.

        Returns
        -------
        list of DeviceTensor ``[2, H_i, n, D_i]``
            One per attention layer: K, then V, dense, in the cache's dtype and memory, whatever the layout. They share one allocation.
            Scales are not in them: they are the configuration's.
        """
        self._check_open()
        index = slot_index(slot, self._kv.max_batch_size)
        number = int_in_range("sequence_length", sequence_length, 0, self._kv.max_sequence_length)
        refuse_capture(self._memory, "capture_kv_cache", stream)
        return self._rows.capture(index, number, stream=stream)

    def restore_kv_cache(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Copy captured tokens to the front of a slot. Lengths stay as they are.

        ``restoreKVCache`` of seed 003.

        Raises LayoutError.

        Parameters
        ----------
        saved : sequence of DeviceTensor ``[2, H_i, n, D_i]``
            What ``capture_kv_cache`` returned, of this cache or of one with equal layers and dtype in the same memory; its layout
            and sizes may differ. With float8 and int8 the scales should be the same: the stored values are copied.
        stream : cuda.core.Stream
            The copies are ordered on it, one launch per head-dim group; the call neither waits nor allocates. The tensors must
            stay until it is done.
        """
        self._check_open()
        refuse_capture(self._memory, "restore_kv_cache", stream)
        self._rows.restore(saved, slot, stream=stream)
