"""``SlotStorage``: what one slot of a cache holds, K and V rows and states, copied to host arrays and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_kvcache.cache.hybrid_cache_manager import HybridCacheManager
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.recurrent_cache import RecurrentCache
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.memory.tensor import DeviceTensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SavedSlot:
    """Contents of a slot in host memory, page-locked for a device.

    ``rows``: list of ndarray ``[H_i, n, D_i]``. K, then V, of each attention layer.
    ``states``: list of ndarray ``[1, ...]``. Current recurrent states of each recurrent layer, then conv states.
    ``nbytes``: Bytes of both.
    """

    rows: list[Array]
    states: list[Array]
    nbytes: int


class SlotStorage:
    """Copies between slots of a cache and the host. Bytes are not changed on the way, whatever the dtype.

    Copies are ordered on ``stream``, one for each head of K and of V and for each state: they need neither kernels nor memory on
    the device. Slots and tokens are not checked here.

    ``cache``: KVCacheManager, LinearKVCache or HybridCacheManager.
    """

    def __init__(self, cache: KVCacheBase | HybridCacheManager) -> None:
        kv = cache.kv_cache_manager if isinstance(cache, HybridCacheManager) else cache
        self._memory = cache.memory
        self._views = [] if kv is None else [view for layer in range(kv.num_layers) for view in kv.get_separate_kv_cache(layer)]
        recurrent = cache.mamba_cache_manager if isinstance(cache, HybridCacheManager) else cache
        self._recurrent = recurrent if isinstance(recurrent, RecurrentCache) and recurrent.num_recurrent_layers else None
        self._two_buffers = self.is_recurrent and self._states(0)[0].ptr != self._states(0, following=True)[0].ptr

    @property
    def is_recurrent(self) -> bool:
        """Whether slots hold states."""
        return self._recurrent is not None

    def row_shapes(self, count: int) -> list[tuple[int, int, int]]:
        """Return the shapes ``[H_i, count, D_i]`` of K, then V, of each attention layer."""
        return [(view.shape[1], count, view.shape[3]) for view in self._views]

    def read_rows(self, arrays: Sequence[Array], slot: int, *, stream: Any) -> None:
        """Copy the first tokens of a slot into dense arrays of :meth:`row_shapes`. They are there after ``synchronize``."""
        for view, array in zip(self._views, arrays, strict=True):
            for tensor, rows in zip(_head_rows(view, slot, 0, array.shape[1]), array, strict=True):
                self._memory.download(rows, tensor, stream=stream)

    def write_rows(self, arrays: Sequence[Array], slot: int, first: int, *, stream: Any) -> None:
        """Copy dense arrays of :meth:`row_shapes` into a slot from token ``first`` on. They must stay until it is done."""
        for view, array in zip(self._views, arrays, strict=True):
            for tensor, rows in zip(_head_rows(view, slot, first, array.shape[1]), array, strict=True):
                self._memory.upload(tensor, rows, stream=stream)

    def save(self, slot: int, count: int, *, stream: Any) -> SavedSlot:
        """Copy the first tokens of a slot, and its states, to the host. They are there after ``synchronize``.

        Raises :class:`CapacityError` before anything is copied where the host has no room.
        """
        states = self._states(slot)
        parts = [(shape, view.dtype) for shape, view in zip(self.row_shapes(count), self._views, strict=True)]
        arrays = self._host_arrays([*parts, *((tensor.shape, tensor.dtype) for tensor in states)])
        saved = SavedSlot(arrays[: len(parts)], arrays[len(parts) :], sum(array.nbytes for array in arrays))
        self.read_rows(saved.rows, slot, stream=stream)
        for array, tensor in zip(saved.states, states, strict=True):
            self._memory.download(array, tensor, stream=stream)
        return saved

    def restore(self, saved: SavedSlot, slot: int, *, waiting: bool = False, stream: Any) -> None:
        """Copy what was saved into a slot. ``saved`` must stay until it is done.

        A sequence that is ``waiting``, in a slot that no enqueue writes, gets its states into both buffers of a ping-pong: they
        are the current ones however often those that are run are swapped.
        """
        self.write_rows(saved.rows, slot, 0, stream=stream)
        for following in (False, True) if waiting and self._two_buffers else (False,):
            for array, tensor in zip(saved.states, self._states(slot, following=following), strict=True):
                self._memory.upload(tensor, array, stream=stream)

    def keep_states(self, slot: int, *, stream: Any) -> None:
        """Copy the states of a slot that leaves the active batch into both buffers of a ping-pong, as for one that is waiting."""
        if self._recurrent is not None and self._two_buffers:
            self._recurrent.keep_states(slot, stream=stream)

    def zero_states(self, slot: int, *, stream: Any) -> None:
        """Set the current states of a slot to zero."""
        for tensor in self._states(slot):
            self._memory.zero(tensor, stream=stream)

    def _states(self, slot: int, *, following: bool = False) -> list[DeviceTensor]:
        """Return the current or next states of a slot, ``[1, ...]`` each: they are other ones after each ``swap`` of a ping-pong."""
        cache = self._recurrent
        if cache is None:
            return []
        layers = range(cache.num_recurrent_layers)
        current, after = (cache.get_recurrent_state, cache.get_conv_state), (cache.get_next_recurrent_state, cache.get_next_conv_state)
        return [get(layer)[slot : slot + 1] for get in (after if following else current) for layer in layers]

    def _host_arrays(self, parts: Sequence[tuple[tuple[int, ...], str]]) -> list[Array]:
        sizes = [int(np.prod(shape)) * numpy_dtype(dtype).itemsize for shape, dtype in parts]
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        buffer = self._memory.staging((sum(sizes),), "uint8")
        return [
            buffer[end - size : end].view(numpy_dtype(dtype)).reshape(shape)
            for (shape, dtype), size, end in zip(parts, sizes, ends, strict=True)
        ]


def _head_rows(view: DeviceTensor, slot: int, first: int, count: int) -> list[DeviceTensor]:
    """Return ``count`` rows from ``first`` on of one slot of a view ``[B, H, S, D]``, dense ``[count, D]``, one for each head."""
    _, heads, longest, head_dim = view.shape
    rows = view[slot : slot + 1].reshape(heads * longest, head_dim)
    return [rows[start : start + count] for start in range(first, first + heads * longest, longest)]
