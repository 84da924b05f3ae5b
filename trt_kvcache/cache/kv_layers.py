"""``KVLayers``: K and V of all attention layers of a cache: their views, and kernel launches and copies over all layers."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
from trt_kvcache.cache.layout import KVLayerStorage, KVLayout
from trt_kvcache.cache.resources import Resources
from trt_kvcache.dtypes import itemsize
from trt_kvcache.errors import ShapeError
from trt_kvcache.kernels import AnyCompactionPlan, KVLayerInfos
from trt_kvcache.kernels.kv_kernels import compact_layers_kernel, instantiate_layers_kernel, save_layers_kernel
from trt_kvcache.kernels.layer_views import SAVED_NDIM
from trt_kvcache.kernels.scale_views import saved_scales, scale_infos, single_scales
from trt_kvcache.kernels.token_path_kernels import keep_paths_kernel
from trt_kvcache.memory.base import Allocation, Array
from trt_kvcache.memory.saved_tensors import allocate_tensors, check_saved
from trt_kvcache.memory.tensor import DeviceTensor


class SavedRows(NamedTuple):
    """K and V of the first n tokens of a slot, and their scales by token, in the memory of the cache."""

    #: ``[2, H_i, n, D_i]`` of each attention layer: K, then V. With scales by token ``[2, H_i, n']`` float32 of each layer follow,
    #: with n' the smallest multiple of 4 from n on.
    tensors: list[DeviceTensor]
    #: The same tensors, grouped as :attr:`KVLayers.infos` are.
    infos: list[KVLayerInfos]


class KVLayers:
    """K and V of all attention layers, one of the :class:`~trt_kvcache.cache.slot_contents.SlotContents` of a cache."""

    # Callers have checked slots, numbers of tokens and streams, except where a docstring says otherwise.

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
        #: The layers that one launch moves: for each head dim its layers, and last the scales by token of all layers.
        self.infos = (*(group.layer_infos for group in self.groups), *(() if self.scale_rows is None else (self.scale_rows,)))

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

    # --- changes of slots ---

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows stay where they are."""

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: rows past the length of a slot, and their scales, are never read as data."""

    def zero(self, count: int, *, stream: Any) -> None:
        """Set all rows of the first ``count`` slots to zero, the stale ones too."""
        for combined, separate in zip(self.combined, self.separate, strict=True):
            for view in separate if self.config.layout is KVLayout.SEPARATE else (combined,):
                self._memory.zero(view[:count], stream=stream)

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Move the live rows of slots, in one launch per head-dim group, and one for their scales."""
        for infos in self.infos:
            compact_layers_kernel(infos, plan, stream)

    def keep_paths(self, starts: DeviceTensor, paths: DeviceTensor, counts: DeviceTensor, *, stream: Any) -> None:
        """Move the rows at the indices ``paths`` after ``starts`` of each slot to directly after ``starts``."""
        for infos in self.infos:
            keep_paths_kernel(infos, starts, paths, counts, stream)

    # --- copies within the memory of the cache: one launch for each of `infos` ---

    def capture(self, slot: int, sequence_length: int, *, stream: Any) -> SavedRows:
        """Copy the first rows of a slot, and their scales, into new tensors."""
        saved = self.allocate_saved(sequence_length, stream=stream)
        for infos, into in zip(self.infos, saved.infos, strict=True):
            save_layers_kernel(infos, into, slot, infos.rows(sequence_length), stream)
        return saved

    def allocate_saved(self, sequence_length: int, *, stream: Any) -> SavedRows:
        """Allocate the tensors of :meth:`capture`: one allocation for K and V, and one for scales. Their bytes are not set."""
        kv_shapes, scale_shapes = self._saved_shapes(sequence_length)
        tensors = allocate_tensors(self._memory, kv_shapes, self.config.dtype, stream=stream)
        if scale_shapes:
            tensors += allocate_tensors(self._memory, scale_shapes, "float32", stream=stream)
        return self._saved_rows(tensors, stream)

    def restore(self, saved: SavedRows, slot: int, sequence_length: int, *, stream: Any) -> None:
        """Copy the first rows of captured tensors, and their scales, to the front of a slot."""
        for infos, source in zip(self.infos, saved.infos, strict=True):
            instantiate_layers_kernel(infos, source, slot, infos.rows(sequence_length), stream)

    def restore_tensors(self, tensors: Sequence[DeviceTensor], slot: int, *, stream: Any) -> None:
        """Check tensors that a user gave, then copy all their rows, and their scales, to the front of a slot."""
        sequence_length = self._sequence_length_of(tensors)
        kv_shapes, scale_shapes = self._saved_shapes(sequence_length)
        if scale_shapes and isinstance(tensors, Sequence) and len(tensors) == 2 * self.config.num_layers:
            check_saved(tensors[: len(kv_shapes)], kv_shapes, self.config.dtype, self._memory, per="attention layer")
            check_saved(tensors[len(kv_shapes) :], scale_shapes, "float32", self._memory, per="attention layer", what="saved scales")
        else:
            expected = [*kv_shapes, *scale_shapes]
            check_saved(tensors, expected, self.config.dtype, self._memory, per="attention layer" + " and its scales" * bool(scale_shapes))
        self.restore(self._saved_rows(list(tensors), stream), slot, sequence_length, stream=stream)

    def _saved_shapes(self, sequence_length: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shapes of the saved K and V of each layer, and of their scales by token."""
        config = self.config
        scales: list[tuple[int, ...]] = []
        if config.scales_by_token:
            scales = [(2, layer.num_kv_heads, saved_scales(sequence_length)) for layer in config.layers]
        return [(2, layer.num_kv_heads, sequence_length, layer.head_dim) for layer in config.layers], scales

    def _sequence_length_of(self, tensors: Sequence[DeviceTensor]) -> int:
        """Return the number of tokens in the first tensor. If there is no first one, ``check_saved`` reports it."""
        first = tensors[0] if isinstance(tensors, Sequence) and tensors else None
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

    def _saved_rows(self, tensors: list[DeviceTensor], stream: Any) -> SavedRows:
        infos = [KVLayerInfos([tensors[index] for index in group.attn_layer_indices], stream=stream) for group in self.groups]
        if self.scale_rows is not None:
            infos.append(scale_infos(tensors[self.config.num_layers :], stream=stream))
        return SavedRows(tensors, infos)

    # --- direct copies to and from the host: one for each head, without a kernel and without memory on the device ---
    #
    # Host arrays are K, then V, ``[H_i, n, D_i]`` of each layer; with scales by token the scales of K, then of V, ``[H_i, n]`` float32 of
    # each layer follow. The rows of a head are dense. The arrays must stay until the stream was waited for.

    def download(self, arrays: Sequence[Array], slot: int, *, stream: Any) -> None:
        """Copy the first n rows of a slot, and their scales, to host arrays."""
        for array, tensors in self._heads_of(arrays, slot, 0):
            for head, tensor in zip(array, tensors, strict=True):
                self._memory.download(head, tensor, stream=stream)

    def upload(self, arrays: Sequence[Array], slot: int, first: int, *, stream: Any) -> None:
        """Copy host arrays to rows ``first`` to ``first + n - 1`` of a slot, and their scales."""
        for array, tensors in self._heads_of(arrays, slot, first):
            for head, tensor in zip(array, tensors, strict=True):
                self._memory.upload(tensor, head, stream=stream)

    def _heads_of(self, arrays: Sequence[Array], slot: int, first: int) -> Iterator[tuple[Array, list[DeviceTensor]]]:
        """Yield each array as ``[H, n, D]`` with the tensors ``[n, D]`` of its heads in a slot, from token ``first`` on."""
        for index, array in enumerate(arrays):
            layer, side = divmod(index, 2)
            rows = array if layer < self.config.num_layers else array[..., np.newaxis]
            yield rows, head_rows(self._layers_and_scales[layer], slot, side, first, array.shape[1])

    @cached_property
    def _layers_and_scales(self) -> list[DeviceTensor]:
        """K and V ``[B, 2, H, S, D]`` of each layer, then the scales by token of each layer as rows of one element."""
        return [*self.combined, *(single_scales(rows) for rows in (() if self.scale_rows is None else self.scale_rows.views))]


def head_rows(layer: DeviceTensor, slot: int, side: int, first: int, count: int) -> list[DeviceTensor]:
    """Return dense views ``[count, D]`` of the rows of each head in one slot of ``[B, 2, H, S, D]``; ``side`` is 0 for K, 1 for V."""
    slot_stride, kv_stride, head_stride, row_stride, _ = layer.strides
    start = slot * slot_stride + side * kv_stride + first * row_stride
    size, shape = itemsize(layer.dtype), (count, layer.shape[-1])
    return [
        DeviceTensor(layer.allocation, shape=shape, dtype=layer.dtype, offset=layer.offset + (start + head * head_stride) * size)
        for head in range(layer.shape[2])
    ]


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
