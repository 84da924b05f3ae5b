"""``SlotTransfer``: moves the contents of the slots of a cache to tensors and to host arrays, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.cache.cache import Cache
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.kernels import KVLayerInfos, instantiate_kv_cache_batched, instantiate_rows, save_kv_cache_batched, save_rows
from trt_kvcache.kernels.scale_views import saved_scales, scale_infos, single_scales
from trt_kvcache.memory.base import Array
from trt_kvcache.memory.saved_tensors import allocate_tensors
from trt_kvcache.memory.shapes import dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import SlotFormat


class SavedTensors(NamedTuple):
    """The contents of a slot as the kernels save them, in the memory of the cache."""

    #: ``[2, H_i, n, D_i]`` of each attention layer: K, then V.
    kv: list[DeviceTensor]
    #: The same tensors by head dim, as ``KVCacheManager.kv_head_dim_groups`` groups the layers.
    kv_groups: list[KVLayerInfos]
    #: ``[2, H_i, n']`` float32 of each attention layer with scales by token, n rounded up to a multiple of 4; else empty.
    scales: list[DeviceTensor]
    #: The same tensors as rows that kernels move.
    scale_rows: KVLayerInfos | None
    #: ``[num_heads, head_dim, state_size]`` and ``[conv_dim, conv_kernel]`` of each recurrent layer.
    states: Mapping[StateKind, list[DeviceTensor]]


class SlotTransfer:
    """Moves the contents of the slots of one cache. Bytes are not changed on the way, whatever the dtype."""

    def __init__(self, cache: Cache) -> None:
        #: What the slots hold.
        self.slot_format = SlotFormat.of(cache)
        self._cache = cache
        self._memory = cache.memory
        self._groups = cache.kv_head_dim_groups
        self._scale_rows = cache.kv_scale_rows
        self._states = cache.states

    def allocate(self, length: int, *, stream: Any) -> SavedTensors:
        """Allocate the tensors that :meth:`save` fills."""
        layers: list[DeviceTensor] = []
        if self._groups:
            layers = allocate_tensors(self._memory, self.slot_format.kv_shapes(length), self.slot_format.kv_dtype, stream=stream)
        groups = [KVLayerInfos([layers[index] for index in group.attn_layer_indices], stream=stream) for group in self._groups]
        scale_shapes = self.slot_format.scale_shapes(saved_scales(length))
        scales = allocate_tensors(self._memory, scale_shapes, "float32", stream=stream) if scale_shapes else []
        states = {
            kind: allocate_tensors(self._memory, [storage.slot_shape] * storage.num_layers, storage.dtype, stream=stream)
            for kind, storage in self.slot_format.state_storages.items()
        }
        return SavedTensors(layers, groups, scales, scale_infos(scales, stream=stream) if scales else None, states)

    def save(self, slot: int, length: int, *, stream: Any) -> SavedTensors:
        """Copy the first tokens and the current states of a slot within the memory of the cache."""
        saved = self.allocate(length, stream=stream)
        for group, infos in zip(self._groups, saved.kv_groups, strict=True):
            save_kv_cache_batched(group.layer_infos, infos, slot, length, stream=stream)
        if self._scale_rows is not None and saved.scale_rows is not None:
            save_kv_cache_batched(self._scale_rows, saved.scale_rows, slot, length, stream=stream)
        if self._states is not None:
            for kind, tensors in saved.states.items():
                save_rows(self._states.current(kind).infos, tensors, slot, stream=stream)
        return saved

    def instantiate(self, saved: SavedTensors, slot: int, length: int, *, stream: Any) -> None:
        """Copy the first tokens and the states that were saved into a slot, within the memory of the cache."""
        for group, infos in zip(self._groups, saved.kv_groups, strict=True):
            instantiate_kv_cache_batched(group.layer_infos, infos, slot, length, stream=stream)
        if self._scale_rows is not None and saved.scale_rows is not None:
            instantiate_kv_cache_batched(self._scale_rows, saved.scale_rows, slot, length, stream=stream)
        if self._states is not None:
            for kind, tensors in saved.states.items():
                instantiate_rows(self._states.current(kind).infos, tensors, slot, stream=stream)

    def host_arrays(self, length: int) -> tuple[Array, ...]:
        """Allocate the host arrays of a copy."""
        tensors = self.slot_format.tensors(length).values()
        sizes = [dense_nbytes(shape, dtype) for shape, dtype in tensors]
        buffer = self._memory.staging((sum(sizes),), "uint8")
        arrays, end = [], 0
        for (shape, dtype), size in zip(tensors, sizes, strict=True):
            start, end = end, end + size
            arrays.append(buffer[start:end].view(numpy_dtype(dtype)).reshape(shape))
        return tuple(arrays)

    def download(self, slot: int, length: int, *, stream: Any) -> tuple[Array, ...]:
        """Copy the first tokens and the current states of a slot directly to the host."""
        arrays = self.host_arrays(length)
        num_rows = len(arrays) - self._num_states
        self.download_rows(arrays[:num_rows], slot, stream=stream)
        for array, tensor in zip(arrays[num_rows:], self._states_of(slot), strict=True):
            self._memory.download(array, tensor, stream=stream)
        return arrays

    def upload(self, arrays: Sequence[Array], slot: int, length: int, *, both_buffers: bool = False, stream: Any) -> None:
        """Copy the first tokens and the states from host arrays directly into a slot."""
        num_rows = len(arrays) - self._num_states
        self.upload_rows([array[:, :length] for array in arrays[:num_rows]], slot, 0, stream=stream)
        for following in (False, True) if both_buffers and self._has_two_buffers else (False,):
            for array, tensor in zip(arrays[num_rows:], self._states_of(slot, following=following), strict=True):
                self._memory.upload(tensor, array, stream=stream)

    def download_rows(self, rows: Sequence[Array], slot: int, *, stream: Any) -> None:
        """Copy the first tokens of a slot directly to the host."""
        for array, heads in self._rows_of(slot, 0, rows):
            for head, tensor in zip(array, heads, strict=True):
                self._memory.download(head, tensor, stream=stream)

    def upload_rows(self, rows: Sequence[Array], slot: int, first: int, *, stream: Any) -> None:
        """Copy tokens from the host directly into a slot."""
        for array, heads in self._rows_of(slot, first, rows):
            for head, tensor in zip(array, heads, strict=True):
                self._memory.upload(tensor, head, stream=stream)

    def copy_to_both_buffers(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot that leaves the active batch to the next ones too: see ``both_buffers`` of :meth:`upload`."""
        if self._has_two_buffers:
            self._cache.keep_states(slot, stream=stream)

    def zero_states(self, slot: int, *, stream: Any) -> None:
        """Set the current states of a slot to zero."""
        for tensor in self._states_of(slot):
            self._memory.zero(tensor, stream=stream)

    @property
    def _num_states(self) -> int:
        return sum(storage.num_layers for storage in self.slot_format.state_storages.values())

    @property
    def _has_two_buffers(self) -> bool:
        return self.slot_format.mamba is not None and self.slot_format.mamba.ping_pong

    @cached_property
    def _layers(self) -> list[DeviceTensor]:
        """K and V ``[B, 2, H_i, S, D_i]`` of each attention layer, and then the scales by token of each, as rows of one element."""
        views = chain.from_iterable(zip(group.attn_layer_indices, group.layer_infos.views, strict=True) for group in self._groups)
        scales = () if self._scale_rows is None else self._scale_rows.views
        return [view for _, view in sorted(views, key=lambda pair: pair[0])] + [single_scales(view) for view in scales]

    def _rows_of(self, slot: int, first: int, rows: Sequence[Array]) -> Iterator[tuple[Array, list[DeviceTensor]]]:
        """Yield each array of ``rows`` with the tensors ``[n, D]`` of its heads in a slot, from token ``first`` on."""
        for index, array in enumerate(rows):
            layer, k_or_v = divmod(index, 2)
            whole = array if layer < len(self._layers) - self._num_scales else array[..., np.newaxis]
            yield whole, head_rows(self._layers[layer], slot, k_or_v, first, array.shape[1])

    @property
    def _num_scales(self) -> int:
        return 0 if self._scale_rows is None else self._scale_rows.num_layers

    def _states_of(self, slot: int, *, following: bool = False) -> list[DeviceTensor]:
        """Return the current or next states of a slot, ``[1, ...]``, of all layers and kinds. Each ``swap`` exchanges the two."""
        if self._states is None:
            return []
        buffer = self._states.next if following else self._states.current
        return [layer[slot : slot + 1] for kind in self._states.kinds for layer in buffer(kind).layers]


def head_rows(layer: DeviceTensor, slot: int, k_or_v: int, first: int, count: int) -> list[DeviceTensor]:
    """Return rows of each head of one slot of a layer."""
    slot_stride, kv_stride, head_stride, row_stride, _ = layer.strides
    start = slot * slot_stride + k_or_v * kv_stride + first * row_stride
    size, shape = itemsize(layer.dtype), (count, layer.shape[-1])
    return [
        DeviceTensor(layer.allocation, shape=shape, dtype=layer.dtype, offset=layer.offset + (start + head * head_stride) * size)
        for head in range(layer.shape[2])
    ]
