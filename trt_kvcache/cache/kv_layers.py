"""``KVLayers``: K and V of all attention layers of a cache. Their views, and kernels over all of them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.layout import KVLayerStorage
from trt_kvcache.cache.resources import Resources
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels import (
    AnyCompactionPlan,
    KVLayerInfos,
    compact_kv_cache_batched,
    instantiate_kv_cache_batched,
    save_kv_cache_batched,
)
from trt_kvcache.kernels.layer_views import SAVED_NDIM
from trt_kvcache.kernels.scale_views import saved_scales, scale_infos
from trt_kvcache.memory.base import Allocation
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved
from trt_kvcache.memory.tensor import DeviceTensor


class KVLayers:
    """K and V of all attention layers, one of the :class:`~trt_kvcache.cache.slot_contents.SlotContents` of a cache."""

    is_recurrent = False

    def __init__(self, config: KVCacheConfig, resources: Resources, *, stream: Any, one_allocation: bool = False) -> None:
        #: The layers.
        self.config = config
        self._memory = resources.memory
        layers = self._allocate(resources, stream, one_allocation)
        #: For each layer K and V as one view ``[B, 2, H, S, D]``.
        self.combined = tuple(_combined_view(*layer) for layer in layers)
        #: For each layer K and V as two views ``[B, H, S, D]``.
        self.separate = tuple(_separate_views(*layer) for layer in layers)
        #: For each layer its float32 scales: static ``[2, H]``, or by token ``[B, 2, H, S']``; empty for a dtype without scales.
        self.scales = self._make_scales(resources, stream) if config.has_scales else ()
        #: The scales by token of all layers, as rows that kernels move; None without them.
        self.scale_rows: KVLayerInfos | None = None
        if config.scales_by_token:
            self.scale_rows = resources.add(scale_infos(self.scales, stream=stream))
        #: The layers by head dim.
        self.groups = self._make_groups(resources, stream)

    def _allocate(self, resources: Resources, stream: Any, one_allocation: bool) -> list[tuple[Allocation, int, KVLayerStorage]]:
        """Return for each layer its allocation, the byte in it at which the layer starts, and its strides."""
        storages = self.config.storages
        if not one_allocation:
            return [(resources.allocate(storage.nbytes, stream=stream), 0, storage) for storage in storages]
        *starts, nbytes = accumulate((storage.nbytes for storage in storages), initial=0)
        allocation = resources.allocate(nbytes, stream=stream)
        return [(allocation, start, storage) for start, storage in zip(starts, storages, strict=True)]

    def _make_scales(self, resources: Resources, stream: Any) -> tuple[DeviceTensor, ...]:
        config = self.config
        allocation = resources.allocate(config.scales_nbytes, stream=stream)
        starts = [0, *accumulate(config.layer_scales_nbytes)]
        if config.scales_by_token:
            return tuple(_scales_view(allocation, start, storage) for start, storage in zip(starts, config.scale_storages, strict=False))
        tensors = []
        for layer, start in zip(config.layers, starts, strict=False):
            scales = np.array(layer.head_scales, np.float32)
            tensors.append(DeviceTensor(allocation, shape=scales.shape, dtype="float32", offset=start))
            self._memory.upload(tensors[-1], scales, stream=stream)
        return tuple(tensors)

    def _make_groups(self, resources: Resources, stream: Any) -> tuple[KVHeadDimGroup, ...]:
        members: dict[int, list[int]] = {}
        for index, layer in enumerate(self.config.layers):
            members.setdefault(layer.head_dim, []).append(index)
        return tuple(
            KVHeadDimGroup(resources.add(KVLayerInfos([self.combined[index] for index in indices], stream=stream)), tuple(indices))
            for indices in members.values()
        )

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows stay where they are."""

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows past the length of a slot, and their scales, are never read as data."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move the live rows of slots, in one launch per head-dim group, and one for their scales."""
        for group in self.groups:
            compact_kv_cache_batched(group.layer_infos, plan, stream=stream)
        if self.scale_rows is not None:
            compact_kv_cache_batched(self.scale_rows, plan, stream=stream)

    def capture(self, slot: int, sequence_length: int, *, stream: Any) -> list[DeviceTensor]:
        """Copy the first rows of a slot into new tensors ``[2, H_i, sequence_length, D_i]``, and their scales into as many more."""
        saved = self._allocate_saved(sequence_length, stream)
        for infos, tensors in self._pairs_of(saved, stream):
            save_kv_cache_batched(infos, tensors, slot, sequence_length, stream=stream)
        return saved

    def restore(self, saved: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Check captured tensors, then copy their rows, and their scales, to the front of a slot."""
        sequence_length = self._sequence_length_of(saved)
        kv_shapes, scale_shapes = self._saved_shapes(sequence_length)
        if scale_shapes and isinstance(saved, Sequence) and len(saved) == 2 * self.config.num_layers:
            check_saved(saved[: len(kv_shapes)], kv_shapes, self.config.dtype, self._memory, per="attention layer")
            check_saved(saved[len(kv_shapes) :], scale_shapes, "float32", self._memory, per="attention layer", what="saved scales")
        else:
            expected = [*kv_shapes, *scale_shapes]
            check_saved(saved, expected, self.config.dtype, self._memory, per="attention layer" + " and its scales" * bool(scale_shapes))
        for infos, tensors in self._pairs_of(saved, stream):
            instantiate_kv_cache_batched(infos, tensors, slot, sequence_length, stream=stream)

    def _allocate_saved(self, sequence_length: int, stream: Any) -> list[DeviceTensor]:
        kv_shapes, scale_shapes = self._saved_shapes(sequence_length)
        saved = allocate_tensors(self._memory, kv_shapes, self.config.dtype, stream=stream)
        return saved + (allocate_tensors(self._memory, scale_shapes, "float32", stream=stream) if scale_shapes else [])

    def _saved_shapes(self, sequence_length: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shapes of what is saved of so many tokens: K and V of each layer, and their scales if tokens have them."""
        config = self.config
        scales: list[tuple[int, ...]] = []
        if config.scales_by_token:
            scales = [(2, layer.num_kv_heads, saved_scales(sequence_length)) for layer in config.layers]
        return [(2, layer.num_kv_heads, sequence_length, layer.head_dim) for layer in config.layers], scales

    def _sequence_length_of(self, saved: Sequence[DeviceTensor]) -> int:
        """Return the tokens that saved tensors hold, as the first one says. If there is no first one, ``check_saved`` says so."""
        first = saved[0] if isinstance(saved, Sequence) and saved else None
        if not isinstance(first, DeviceTensor):
            return 0
        if first.ndim != SAVED_NDIM:
            raise ShapeError(f"saved[0]: expected a tensor [2, H, n, D], got {first!r}.")
        tokens = first.shape[2]
        if tokens > self.config.max_sequence_length:
            raise ShapeError(
                f"saved[0]: expected at most max_sequence_length={self.config.max_sequence_length} tokens, got {tokens} in {first!r}."
            )
        return tokens

    def _pairs_of(self, saved: Sequence[DeviceTensor], stream: Any) -> list[tuple[KVLayerInfos, KVLayerInfos]]:
        """Return the layers of the cache that a launch moves, with the tensors that are saved of them; scales come last."""
        pairs = [
            (group.layer_infos, KVLayerInfos([saved[index] for index in group.attn_layer_indices], stream=stream)) for group in self.groups
        ]
        if self.scale_rows is not None:
            pairs.append((self.scale_rows, scale_infos(saved[self.config.num_layers :], stream=stream)))
        return pairs


def _combined_view(allocation: Allocation, start: int, storage: KVLayerStorage) -> DeviceTensor:
    return DeviceTensor(allocation, shape=storage.combined_shape, dtype=storage.dtype, strides=storage.combined_strides, offset=start)


def _scales_view(allocation: Allocation, start: int, storage: KVLayerStorage) -> DeviceTensor:
    """Return the scales ``[B, 2, H, S']`` whose rows of four a storage describes."""
    *shape, rows, granule = storage.combined_shape
    return DeviceTensor(
        allocation, shape=(*shape, rows * granule), dtype=storage.dtype, strides=(*storage.combined_strides[:3], 1), offset=start
    )


def _separate_views(allocation: Allocation, start: int, storage: KVLayerStorage) -> tuple[DeviceTensor, DeviceTensor]:
    k, v = (
        DeviceTensor(allocation, shape=storage.separate_shape, dtype=storage.dtype, strides=storage.separate_strides, offset=start + shift)
        for shift in (0, storage.kv_stride * itemsize(storage.dtype))
    )
    return k, v
