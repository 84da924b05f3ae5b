"""``SequenceCacheManager`` (seed 002): sequences by handle, over the slots of another manager, swapped to the host where slots run out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int, int_in_range, slot_index
from trt_kvcache.cache.estimate import estimate_memory
from trt_kvcache.cache.hybrid_cache_manager import HybridCacheManager
from trt_kvcache.cache.kv_cache_base import KVCacheBase
from trt_kvcache.cache.kv_cache_manager import KVCacheManager
from trt_kvcache.cache.linear_kv_cache import LinearKVCache
from trt_kvcache.cache.slot_cache import Closable
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CapacityError, ConfigError, DTypeError, RangeError, ShapeError
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_storage import Array, SlotStorage
from trt_kvcache.sequences.swapping import SlotSwapper
from trt_kvcache.sequences.table import SequenceEntry, SequenceTable

#: K or V of a sequence: ``[L, H, n, D]`` where layers are equal, else ``[H_i, n, D_i]`` of each attention layer.
LayerArrays = Array | list[Array]


class SequenceCacheManager(Closable):
    """Sequences by handle, over the slots of a cache that an engine may be running on. Not thread-safe.

    ``KVCacheManager`` of TinyLLM (seed 002).

    A sequence waits in a slot that is not active, the last such slot first; its tokens are counted here. Active slots belong
    to whoever made them active. Those without a sequence are never used, and a sequence in an active slot is pinned: its length
    is what the cache's lengths say. So a sequence is run like this::

        cache.set_active_batch_size(1, stream=stream)
        sequences.pin(seq, slot=0, stream=stream)        # its tokens and states are in slot 0, its length is committed
        ...                                              # enqueue, commit
        sequences.unpin(seq, stream=stream)              # out of the active slot again

    A sequence follows its slot through ``compact_batch``, and keeps its tokens and states where its slot leaves the active batch.
    Its tokens are lost, and every use of it but its destruction raises :class:`SequenceError`, if its slot is overwritten there, or
    if somebody makes its slot active again: with length 0 unless it is empty, or with a length that was reset unless it is pinned
    (then it is run on with so many tokens). With a device mapping the host cannot follow, and loses all sequences in active slots
    that way; before a captured one is replayed, unpin them.

    ``stream`` is a cuda.core.Stream, on which everything is ordered. What is copied from or to the host is waited for: arrays may be
    changed or read as soon as a call returns.

    Wrong arguments, capturing streams and closed objects raise as :mod:`trt_kvcache.errors` says.

    Raises ConfigError: an argument does not fit.

    Parameters
    ----------
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        Whose memory is shared. It stays the caller's to close, and is under one ``SequenceCacheManager`` at a time.
    enable_swapping
        Let sequences move to host memory (page-locked for a device) where slots run out, and come back when they are used.
    swap_threshold
        Swap already where more than this share of ``memory_capacity`` would be in use; above 0, at most 1.
    """

    def __init__(
        self, cache: KVCacheManager | LinearKVCache | HybridCacheManager, *, enable_swapping: bool = False, swap_threshold: float = 0.85
    ) -> None:
        if not isinstance(cache, KVCacheBase | HybridCacheManager):
            raise ConfigError(
                f"SequenceCacheManager: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got {type(cache).__name__}."
            )
        if not isinstance(enable_swapping, bool):
            raise ConfigError(f"enable_swapping: expected True or False, got {enable_swapping!r}.")
        if isinstance(swap_threshold, bool) or not isinstance(swap_threshold, int | float) or not 0 < swap_threshold <= 1:
            raise ConfigError(f"swap_threshold: expected a number above 0 and at most 1, got {swap_threshold!r}.")
        if any(isinstance(contents, SequenceTable) for contents in cache.lengths.contents()):
            raise ConfigError("SequenceCacheManager: expected a cache without one, got one that is under another. Close that before.")
        self._cache: KVCacheBase | HybridCacheManager = cache
        self._memory = cache.memory
        self._lengths = cache.lengths
        self._storage = SlotStorage(cache)
        self._table = SequenceTable(cache.lengths, self._storage.keep_states)
        threshold = float(swap_threshold) if enable_swapping else None
        self._swapper = SlotSwapper(self._table, self._storage, cache.lengths, estimate_memory(cache.config), threshold=threshold)
        self._lengths.attach(self._table)
        self._closed = False

    @property
    def cache(self) -> KVCacheBase | HybridCacheManager:
        """The cache whose slots these are."""
        return self._cache

    @property
    def dtype(self) -> str | None:
        """What :meth:`append` takes and :meth:`get` returns: the cache's K/V dtype. None without attention layers."""
        kv = self._cache.kv_config
        return None if kv is None else kv.dtype

    @property
    def num_sequences(self) -> int:
        """Sequences, swapped ones included."""
        return len(self._table)

    @property
    def max_sequences(self) -> int | None:
        """The most sequences that there can be: B. None with swapping: as many as the host has room for."""
        return None if self._swapper.enabled else self._cache.max_batch_size

    @property
    def memory_used(self) -> int:
        """Bytes of live tokens and states in the slots: of sequences, and of active slots without one (upper bounds)."""
        return self._swapper.used

    @property
    def memory_swapped(self) -> int:
        """Bytes of tokens and states of swapped sequences, in host memory."""
        return sum(entry.saved.nbytes for entry in self._table if entry.saved is not None)

    @property
    def memory_capacity(self) -> int:
        """What ``memory_used`` is when every slot is full: the cache's bytes without padding and scales."""
        return self._swapper.capacity

    def create_sequence(self) -> int:
        """Return the id of a new, empty sequence. Ids are never used again; slots are.

        Raises CapacityError: no slot is free and, with swapping, none can be made free.
        """
        self._check_open()
        free = self._table.free_slots()
        self._check_free("create_sequence", 1, free)
        return self._table.add(free[0] if free else None).id

    def reserve(self, num_sequences: int) -> None:
        """Return if ``num_sequences`` more can be created now. Nothing is changed: the memory has been there from the start.

        Raises CapacityError: they cannot.
        """
        self._check_open()
        self._check_free("reserve", int_in_range("num_sequences", num_sequences, 0), self._table.free_slots())

    def _check_free(self, what: str, wanted: int, free: list[int]) -> None:
        swapping = self._swapper.enabled
        if wanted > len(free) and not (swapping and (free or self._table.movable())):
            hint = "All are active or pinned." if swapping else "Destroy sequences, or enable swapping."
            raise CapacityError(f"{what}: expected {wanted} free slots, got {len(free)} of {self._cache.max_batch_size}. {hint}")

    def destroy_sequence(self, seq: int) -> None:
        """Forget a sequence. Its slot is free, unless it is active: then it is its runner's.

        Raises :class:`SequenceError` for an unknown or destroyed one, and :class:`ClosedError`.
        """
        self._check_open()
        self._table.remove(seq)

    def destroy_all_sequences(self) -> None:
        """Forget all sequences. Raises :class:`ClosedError`."""
        self._check_open()
        self._table.clear()

    def length(self, seq: int) -> int:
        """Return the tokens of a sequence.

        Waits for the device where the sequence was in an active slot that is not active any more, and only the device knew then.

        Raises LengthsUnknown: the sequence is in an active slot, and only the device knows. Call the cache's ``sync_lengths``.
        """
        self._check_open()
        return self._table.length(self._table.find(seq))

    def append(
        self,
        seq: int,
        keys: Array | DeviceTensor | Sequence[Array | DeviceTensor],
        values: Array | DeviceTensor | Sequence[Array | DeviceTensor],
        *,
        stream: Any,
    ) -> None:
        """Add the K and V of new tokens to a sequence.

        Raises CapacityError: the sequence would exceed ``max_sequence_length``; or it is swapped out, and no slot is free or can be made
        free; or the host has no room for what must make way. ConfigError: the cache has recurrent layers, whose states only an engine can
        advance. LengthsUnknown.

        Parameters
        ----------
        keys, values : array ``[L, H, n, D]``, or sequence of arrays ``[H_i, n, D_i]``
            In the dtype of the cache (:attr:`dtype`): stored values, without scales. One array only where all layers have equal
            heads. Device tensors are read to the host first.
        """
        entry = self._begin("append", seq, stream, of_states=False)
        rows, count = self._new_rows(keys, values)
        length, longest = self._table.length(entry), self._lengths.max_sequence_length
        if length + count > longest:
            raise CapacityError(
                f"sequence {entry.id} holds {length} tokens; appending {count} more exceeds max_sequence_length={longest}. "
                "Nothing was changed."
            )
        slot = self._swapper.bring_in(entry, count, stream=stream)
        self._storage.write_rows(rows, slot, length, stream=stream)
        if self._table.is_active(entry):
            self._lengths.commit([count if other == slot else 0 for other in range(self._lengths.active_batch_size)], stream=stream)
        entry.length = length + count
        self._memory.synchronize(stream)

    def get(self, seq: int, *, stream: Any) -> tuple[LayerArrays, LayerArrays]:
        """Return copies of the K and V of a sequence on the host.

        Raises CapacityError: it is swapped out, and no slot is free or can be made free; or the host has no room for what must make way.
        LengthsUnknown.

        Returns
        -------
        keys, values : ndarray ``[L, H, n, D]``, or list of ndarray ``[H_i, n, D_i]``
            In the dtype of the cache (:attr:`dtype`; ml_dtypes has those that NumPy lacks): stored values, without scales. One array
            if all attention layers have equal heads, else one per attention layer.
        """
        entry = self._begin("get", seq, stream)
        length = self._table.length(entry)
        slot = self._swapper.bring_in(entry, 0, stream=stream)
        kv = self._cache.kv_config
        if kv is None:
            return [], []
        shapes, dtype = self._storage.row_shapes(length), numpy_dtype(kv.dtype)
        keys: LayerArrays
        values: LayerArrays
        if kv.is_uniform:
            keys, values = (np.empty((kv.num_layers, *shapes[0]), dtype) for _ in range(2))
        else:
            keys, values = ([np.empty(shape, dtype) for shape in shapes[which::2]] for which in (0, 1))
        self._storage.read_rows([array for pair in zip(keys, values, strict=True) for array in pair], slot, stream=stream)
        self._memory.synchronize(stream)
        return keys, values

    def truncate(self, seq: int, new_length: int, *, stream: Any) -> None:
        """Shorten a sequence to its first ``new_length`` tokens.

        Raises RangeError: ``new_length`` is negative, or beyond the present length. Nothing was changed. ConfigError: the cache has
        recurrent layers, whose states cannot go back. CapacityError: As for :meth:`get`. LengthsUnknown.
        """
        entry = self._begin("truncate", seq, stream, of_states=False)
        length, wanted = self._table.length(entry), as_int("new_length", new_length)
        if not 0 <= wanted <= length:
            raise RangeError(f"truncate: sequence {entry.id} holds {length} tokens; expected 0 to {length}, got {wanted}.")
        slot = self._swapper.bring_in(entry, 0, stream=stream)
        if self._table.is_active(entry):
            self._lengths.rewind(slot, wanted, stream=stream)
        entry.length = wanted

    def _new_rows(self, keys: Any, values: Any) -> tuple[list[Array], int]:
        """Return dense arrays of K, then V, of each attention layer, and their tokens, after all checks."""
        kv = self._cache.kv_config
        assert kv is not None  # without attention layers there are recurrent ones
        pair = [self._layers_of(name, given, kv.num_layers) for name, given in (("keys", keys), ("values", values))]
        count = pair[0][0].shape[1] if pair[0][0].ndim == 3 else 0
        rows = []
        for layer, shape in enumerate(self._storage.row_shapes(count)[::2]):
            for name, arrays in zip(("keys", "values"), pair, strict=True):
                array, what = arrays[layer], f"{name}[{layer}]"
                if array.dtype != numpy_dtype(kv.dtype):
                    raise DTypeError(f"{what}: expected {kv.dtype}, which the cache stores, got {array.dtype}.")
                if array.shape != shape:
                    raise ShapeError(f"{what}: expected [num_kv_heads, n, head_dim] = {shape}, got {array.shape}.")
                rows.append(np.ascontiguousarray(array))
        return rows, count

    @staticmethod
    def _layers_of(name: str, given: Any, num_layers: int) -> list[Array]:
        if isinstance(given, DeviceTensor):
            given = given.numpy()
        if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes) or getattr(given, "ndim", 1) == 0:
            raise ShapeError(f"{name}: expected an array [L, H, n, D], or an array [H, n, D] per layer, got {type(given).__name__}.")
        if len(given) != num_layers:
            raise ShapeError(f"{name}: expected {num_layers} layers, got {len(given)}.")
        layers = [layer.numpy() if isinstance(layer, DeviceTensor) else layer for layer in given]
        for index, layer in enumerate(layers):
            if not isinstance(layer, np.ndarray):
                raise ShapeError(f"{name}[{index}]: expected an array [H, n, D], got {type(layer).__name__}.")
        return layers

    def pin(self, seq: int, *, slot: int | None = None, stream: Any) -> int:
        """Keep a sequence in a slot, until it is unpinned or destroyed.

        Raises CapacityError: ``slot`` is another's; or there is none for this sequence, or for the one that must make way; or the host has
        no room for it. LengthsUnknown. Nothing was changed.

        Parameters
        ----------
        slot
            Where to; any slot, or the one that it is in, if left out. A sequence that waits there makes way: it goes to the slot
            that this one leaves, to a free one, or (with swapping) to the host. An active slot must be empty; there the length of
            the sequence is committed.

        Returns
        -------
        int
            The slot that it is in. Its states are zero if it has no tokens.
        """
        entry = self._begin("pin", seq, stream)
        length = self._table.length(entry)
        if slot is None:
            place = self._swapper.bring_in(entry, 0, stream=stream)
        else:
            place = slot_index(slot, self._cache.max_batch_size)
            self._swapper.move(entry, place, stream=stream)
        entry.pinned = True
        if not length:
            self._storage.zero_states(place, stream=stream)
        return place

    def unpin(self, seq: int, *, stream: Any) -> None:
        """Let a sequence be moved again. From an active slot it moves at once, and what is in that slot stays its runner's.

        Raises CapacityError: it is in an active slot, and there is no free one nor, with swapping, room on the host. LengthsUnknown.
        Nothing was changed.
        """
        entry = self._begin("unpin", seq, stream)
        self._table.length(entry)
        if self._table.is_active(entry):
            self._swapper.leave(entry, stream=stream)
        self._table.use(entry)
        entry.pinned = False

    def _begin(self, what: str, seq: int, stream: Any, *, of_states: bool = True) -> SequenceEntry:
        self._check_open()
        entry = self._table.find(seq)
        if self._storage.is_recurrent and not of_states:
            raise ConfigError(
                f"{what}: the cache has recurrent layers, and their states follow an engine only. Pin the sequence, and run it."
            )
        refuse_capture(self._memory, what, stream, because="it waits for the device")
        return entry

    def close(self) -> None:
        """Forget all sequences and what they hold on the host. The cache stays open. Idempotent."""
        self._closed = True
        self._lengths.detach(self._table)
        self._table.clear()
