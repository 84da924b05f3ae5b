"""``SequenceCacheManager``: sequences by handle over the slots of a cache, swapped to the host when slots run out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int, int_in_range, slot_index
from trt_kvcache._util.lifetime import Closable
from trt_kvcache.cache.cache import Cache
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CapacityError, ConfigError, DTypeError, RangeError, ShapeError
from trt_kvcache.handles.sequence_swapper import SequenceFollower, SequenceSwapper
from trt_kvcache.handles.sequence_table import SequenceEntry, SequenceTable
from trt_kvcache.memory.base import Array
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.sequences.slot_format import SlotFormat

#: K or V of a sequence: ``[L, H, n, D]`` where layers are equal, else ``[H_i, n, D_i]`` of each attention layer.
LayerArrays = Array | list[Array]


class SequenceCacheManager(Closable):
    """Sequences by handle, over the slots of a cache that an engine may be running on. Not thread-safe.

    Parameters
    ----------
    cache : KVCacheManager, LinearKVCache or HybridCacheManager
        The cache whose slots hold the sequences. The caller closes it. Only one ``SequenceCacheManager`` may use it at a time.
    enable_swapping : bool
        Swap sequences out to the host (page-locked memory for a device) when slots run out. They are swapped in again when they are
        used.
    swap_threshold : float
        With swapping, the share of :attr:`memory_capacity` that may be in use before sequences are swapped out; above 0, at most 1.

    Raises
    ------
    ConfigError
        An argument does not fit, or another ``SequenceCacheManager`` uses the cache.

    Notes
    -----
    ``KVCacheManager`` of TinyLLM.

    Everything is ordered on the ``stream`` of a call, a ``cuda.core.Stream``. Calls that copy from or to the host wait for it: arrays
    may be changed or read as soon as the call returns.

    A sequence waits in a slot that is not active, the highest one first, and this class holds its length. Active slots belong to
    whoever made them active: this class never uses them by itself. A sequence in an active slot cannot be moved, and the
    lengths of the cache hold its length. To run an engine on a sequence::

        cache.set_active_batch_size(1, stream=stream)
        sequences.pin(seq, slot=0, stream=stream)        # its tokens and states are in slot 0, its length is committed
        ...                                              # enqueue, commit
        sequences.unpin(seq, stream=stream)              # it leaves the active slot

    A sequence follows its slot through ``compact_batch``, and keeps its tokens and states when its slot leaves the active batch. If a
    slot becomes active (``set_active_batch_size``, ``reset_for_new_sequences``), the sequence that waits there moves to another slot
    or, with swapping, to the host, and the call waits for the copy. If it cannot move, the call raises :class:`CapacityError`, and
    nothing was changed. Two kinds of sequences stay in the slot: an empty one if the slot begins empty, and a pinned one if the slot
    was reset to a length, with which the sequence continues. A pinned one with tokens cannot stay if the slot would begin empty: that
    is a :class:`CapacityError` too.

    A sequence in an active slot is lost, and everything but destroying it raises :class:`SequenceError`, if

    - a compaction overwrites its slot,
    - a compaction with a mapping on the device drops any slot, because the host does not know which slots were moved (unpin sequences
      before a CUDA graph with such a compaction is replayed).

    Examples
    --------
    Two layers of two heads; three tokens are appended, read back and shortened:

    >>> import numpy as np
    >>> from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, SequenceCacheManager
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> layers = [KVLayerConfig(num_kv_heads=2, head_dim=8)] * 2
    >>> cache = KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=16), memory=memory)
    >>> sequences = SequenceCacheManager(cache, enable_swapping=True)
    >>> seq = sequences.create_sequence()
    >>> keys = np.arange(2 * 2 * 3 * 8).reshape(2, 2, 3, 8).astype(np.float16)
    >>> sequences.append(seq, keys, -keys, stream=stream)
    >>> stored_keys, stored_values = sequences.get(seq, stream=stream)
    >>> stored_keys.shape, bool((stored_keys == keys).all()), bool((stored_values == -keys).all())
    ((2, 2, 3, 8), True, True)
    >>> sequences.truncate(seq, 2, stream=stream)
    >>> sequences.length(seq)
    2

    With swapping there may be more sequences than slots. The least recently used one is swapped out, and comes back unchanged:

    >>> others = [sequences.create_sequence() for _ in range(2)]
    >>> for other in others:
    ...     sequences.append(other, keys, keys, stream=stream)
    >>> sequences.num_sequences, cache.max_batch_size, sequences.memory_swapped
    (3, 2, 256)
    >>> stored_keys, _ = sequences.get(seq, stream=stream)
    >>> bool((stored_keys == keys[:, :, :2]).all())
    True
    >>> sequences.destroy_all_sequences()
    >>> cache.close()
    """

    def __init__(self, cache: Cache, *, enable_swapping: bool = False, swap_threshold: float = 0.85) -> None:
        slot_format = SlotFormat.of(cache, name="SequenceCacheManager")
        if not isinstance(enable_swapping, bool):
            raise ConfigError(f"enable_swapping: expected True or False, got {enable_swapping!r}.")
        if isinstance(swap_threshold, bool) or not isinstance(swap_threshold, int | float) or not 0 < swap_threshold <= 1:
            raise ConfigError(f"swap_threshold: expected a number above 0 and at most 1, got {swap_threshold!r}.")
        if any(isinstance(contents, SequenceFollower) for contents in cache.lengths.contents()):
            raise ConfigError(
                "SequenceCacheManager: expected a cache that no other SequenceCacheManager uses, got one in use. Close that one first."
            )
        super().__init__(cache=cache)
        self._cache: Cache = cache
        self._memory = cache.memory
        self._lengths = cache.lengths
        self._slot_format = slot_format
        self._table = SequenceTable(cache.lengths, self._keep_states)
        threshold = float(swap_threshold) if enable_swapping else None
        self._swapper = SequenceSwapper(self._table, cache, threshold=threshold)
        self._follower = SequenceFollower(self._table, self._swapper)
        self._lengths.attach(self._follower)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._table)} sequences"
        return f"SequenceCacheManager({state}, over {self._cache!r})"

    @property
    def cache(self) -> Cache:
        """The cache whose slots these are."""
        return self._cache

    @property
    def dtype(self) -> str | None:
        """The dtype of K and V, which :meth:`append` takes and :meth:`get` returns. None without attention layers."""
        kv = self._cache.kv_config
        return None if kv is None else kv.dtype

    @property
    def num_sequences(self) -> int:
        """Number of sequences, swapped out or not."""
        return len(self._table)

    @property
    def max_sequences(self) -> int | None:
        """The most sequences that there can be: B. None with swapping, when only the host's memory limits them."""
        return None if self._swapper.enabled else self._cache.max_batch_size

    @property
    def memory_used(self) -> int:
        """Bytes of live tokens and states in the slots: of sequences, and of active slots without one (upper bounds there)."""
        return self._swapper.used

    @property
    def memory_swapped(self) -> int:
        """Bytes on the host of the sequences that are swapped out."""
        return sum(array.nbytes for entry in self._table if entry.saved is not None for array in entry.saved.arrays)

    @property
    def memory_capacity(self) -> int:
        """The ``memory_used`` of a cache whose slots are all full: its bytes without padding and static scales."""
        return self._swapper.capacity

    def create_sequence(self) -> int:
        """Create an empty sequence.

        Returns
        -------
        int
            Its id. Ids are never used again, unlike slots.

        Raises
        ------
        CapacityError
            No slot is free and, with swapping, none can be made free.
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        free = self._table.free_slots()
        self._check_free("create_sequence", 1, free)
        return self._table.add(free[0] if free else None).id

    def reserve(self, num_sequences: int) -> None:
        """Check that more sequences can be created. Nothing is allocated: the cache did that when it was constructed.

        Parameters
        ----------
        num_sequences : int
            Number of additional sequences, 0 or more.

        Raises
        ------
        CapacityError
            There are not enough free slots and, with swapping, none can be made free.
        RangeError
            ``num_sequences`` is negative or not an integer.
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        self._check_free("reserve", int_in_range("num_sequences", num_sequences, 0), self._table.free_slots())

    def _check_free(self, what: str, wanted: int, free: list[int]) -> None:
        swapping = self._swapper.enabled
        if wanted > len(free) and not (swapping and (free or self._table.movable())):
            hint = "All are active or pinned." if swapping else "Destroy sequences, or enable swapping."
            raise CapacityError(f"{what}: expected {wanted} free slots, got {len(free)} of {self._cache.max_batch_size}. {hint}")

    def destroy_sequence(self, seq: int) -> None:
        """Destroy a sequence. Its slot becomes free, unless it is active: then it still belongs to whoever made it active.

        Parameters
        ----------
        seq : int
            The id.

        Raises
        ------
        SequenceError
            The id is unknown, or the sequence was destroyed before.
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        self._table.remove(seq)

    def destroy_all_sequences(self) -> None:
        """Destroy all sequences.

        Raises
        ------
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        self._table.clear()

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence.

        Parameters
        ----------
        seq : int
            The id.

        Returns
        -------
        int
            Tokens. Waits for the device if only the device knew the length when the slot of the sequence left the active batch.

        Raises
        ------
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length. Call ``sync_lengths`` of the cache.
        ClosedError
            This object or its cache is closed.
        """
        self._check_open()
        return self._table.length(self._table.find(seq))

    def append(
        self,
        seq: int,
        keys: Array | DeviceTensor | Sequence[Array | DeviceTensor],
        values: Array | DeviceTensor | Sequence[Array | DeviceTensor],
        *,
        key_scales: Array | DeviceTensor | Sequence[Array | DeviceTensor] | None = None,
        value_scales: Array | DeviceTensor | Sequence[Array | DeviceTensor] | None = None,
        stream: Any,
    ) -> None:
        """Append the K and V of new tokens to a sequence.

        Parameters
        ----------
        seq : int
            The id. The sequence is swapped in if it is swapped out.
        keys, values : ndarray or DeviceTensor ``[L, H, n, D]``, or sequence of them ``[H_i, n, D_i]``
            Of each attention layer, in the dtype of the cache (:attr:`dtype`): stored values, without scales. One array can be given
            only if all layers have equal heads. Tensors on the device are read to the host first.
        key_scales, value_scales : ndarray or DeviceTensor ``[L, H, n]``, or sequence of them ``[H_i, n]``
            float32, one for each token and head; with ``scales="token"`` of the cache, and only then.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Raises
        ------
        CapacityError
            The sequence would exceed ``max_sequence_length``; or it is swapped out and no slot can be made free; or the host has no
            room for a sequence that must be swapped out.
        ShapeError, DTypeError
            ``keys`` or ``values``, or their scales, do not fit.
        ConfigError
            The cache has recurrent layers. Only an engine can advance their states.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        entry = self._begin("append", seq, stream, needs_no_states=True)
        rows, count = self._new_rows(keys, values)
        rows += self._new_scales(key_scales, value_scales, count)
        length, longest = self._table.length(entry), self._lengths.max_sequence_length
        if length + count > longest:
            raise CapacityError(
                f"sequence {entry.id} holds {length} tokens; appending {count} more exceeds max_sequence_length={longest}. "
                "Nothing was changed."
            )
        slot = self._swapper.swap_in(entry, count, stream=stream)
        assert self._cache.kv_layers is not None  # without attention layers there are recurrent ones
        self._cache.kv_layers.upload(rows, slot, length, stream=stream)
        if self._table.is_active(entry):
            self._lengths.commit([count if other == slot else 0 for other in range(self._lengths.active_batch_size)], stream=stream)
        entry.length = length + count
        self._memory.synchronize(stream)

    def get(self, seq: int, *, stream: Any) -> tuple[LayerArrays, LayerArrays]:
        """Copy K and V of a sequence to the host.

        Parameters
        ----------
        seq : int
            The id. The sequence is swapped in if it is swapped out.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        keys, values : ndarray ``[L, H, n, D]``, or list of ndarray ``[H_i, n, D_i]``
            In the dtype of the cache (:attr:`dtype`, of ml_dtypes where NumPy has none): stored values, without scales. One array
            if all attention layers have equal heads, otherwise one per attention layer; empty lists without attention layers.

        Raises
        ------
        CapacityError
            The sequence is swapped out and no slot can be made free; or the host has no room for a sequence that must be swapped out.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        return self._get("get", seq, stream)[0]

    def get_scales(self, seq: int, *, stream: Any) -> tuple[LayerArrays, LayerArrays]:
        """Copy the scales of K and V of a sequence to the host: real value = stored value * scale.

        Parameters
        ----------
        seq : int
            The id. The sequence is swapped in if it is swapped out.
        stream : cuda.core.Stream
            The copies are ordered on it; the call waits.

        Returns
        -------
        key_scales, value_scales : ndarray ``[L, H, n]``, or list of ndarray ``[H_i, n]``
            float32. One array if all attention layers have equal heads, otherwise one per attention layer.

        Raises
        ------
        ConfigError
            The cache has no scales by token: others are part of its configuration.
        CapacityError
            As for :meth:`get`.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        kv = self._cache.kv_config
        if kv is None or not kv.scales_by_token:
            raise ConfigError("get_scales: expected a cache with scales by token, got one without.")
        return self._get("get_scales", seq, stream)[1]

    def _get(self, what: str, seq: int, stream: Any) -> list[tuple[LayerArrays, LayerArrays]]:
        """Copy K and V of a sequence to the host, and their scales by token."""
        entry = self._begin(what, seq, stream)
        length = self._table.length(entry)
        slot = self._swapper.swap_in(entry, 0, stream=stream)
        layers = self._cache.kv_layers
        if layers is None:
            return [([], [])]
        pairs = [self._empty_layers(self._slot_format.kv_shapes(length), layers.config.dtype)]
        if layers.config.scales_by_token:
            pairs.append(self._empty_layers(self._slot_format.scale_shapes(length), "float32"))
        rows = [array for pair in pairs for layer in zip(*pair, strict=True) for array in layer]
        layers.download(rows, slot, stream=stream)
        self._memory.synchronize(stream)
        return pairs

    def _empty_layers(self, shapes: Sequence[tuple[int, ...]], dtype: str) -> tuple[LayerArrays, LayerArrays]:
        """Return arrays for K, and for V, of layers of these shapes ``(2, ...)``: one for all layers if they are equal."""
        kv = self._cache.kv_config
        if kv is not None and kv.is_uniform:
            k, v = (np.empty((kv.num_layers, *shapes[0][1:]), numpy_dtype(dtype)) for _ in range(2))
            return k, v
        return [np.empty(shape[1:], numpy_dtype(dtype)) for shape in shapes], [np.empty(shape[1:], numpy_dtype(dtype)) for shape in shapes]

    def truncate(self, seq: int, new_length: int, *, stream: Any) -> None:
        """Shorten a sequence to its first tokens.

        Parameters
        ----------
        seq : int
            The id. The sequence is swapped in if it is swapped out.
        new_length : int
            Tokens to keep, from 0 to the present length.
        stream : cuda.core.Stream
            Copies and writes are ordered on it.

        Raises
        ------
        RangeError
            ``new_length`` is negative or beyond the present length. Nothing was changed.
        ConfigError
            The cache has recurrent layers. Their states cannot go back to an earlier token.
        CapacityError
            As for :meth:`get`.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        entry = self._begin("truncate", seq, stream, needs_no_states=True)
        length, wanted = self._table.length(entry), as_int("new_length", new_length)
        if not 0 <= wanted <= length:
            raise RangeError(f"truncate: sequence {entry.id} holds {length} tokens; expected 0 to {length}, got {wanted}.")
        slot = self._swapper.swap_in(entry, 0, stream=stream)
        if self._table.is_active(entry):
            self._lengths.rewind(slot, wanted, stream=stream)
        entry.length = wanted

    def _new_rows(self, keys: Any, values: Any) -> tuple[list[Array], int]:
        """Return dense arrays of K, then V, of each attention layer, and their tokens, after all checks."""
        kv = self._cache.kv_config
        assert kv is not None  # without attention layers there are recurrent ones
        pair = {name: self._layers_of(name, given, kv.num_layers) for name, given in (("keys", keys), ("values", values))}
        first = pair["keys"][0]
        count = first.shape[1] if first.ndim == 3 else 0
        shapes = self._slot_format.kv_shapes(count)
        return self._checked(pair, shapes, f"{kv.dtype}, which the cache stores", kv.dtype, "[num_kv_heads, n, head_dim]"), count

    def _new_scales(self, key_scales: Any, value_scales: Any, count: int) -> list[Array]:
        """Return dense arrays of the scales of K, then V, of each attention layer, after all checks; none if tokens have no scales."""
        kv = self._cache.kv_config
        assert kv is not None
        given = {"key_scales": key_scales, "value_scales": value_scales}
        if not kv.scales_by_token:
            for name, scales in given.items():
                if scales is not None:
                    raise DTypeError(f"{name}: expected None, as the cache has no scales by token, got {type(scales).__name__}.")
            return []
        pair = {name: self._layers_of(name, scales, kv.num_layers, "[H, n]") for name, scales in given.items()}
        return self._checked(pair, self._slot_format.scale_shapes(count), "float32", "float32", "[num_kv_heads, n]")

    @staticmethod
    def _checked(
        pair: Mapping[str, Sequence[Array]], shapes: Sequence[tuple[int, ...]], expected: str, dtype: str, form: str
    ) -> list[Array]:
        """Return both arrays of each layer, one after another and dense, after checking them."""
        rows = []
        for layer, shape in enumerate(shapes):
            for name, arrays in pair.items():
                array, what = arrays[layer], f"{name}[{layer}]"
                if array.dtype != numpy_dtype(dtype):
                    raise DTypeError(f"{what}: expected {expected}, got {array.dtype}.")
                if array.shape != shape[1:]:
                    raise ShapeError(f"{what}: expected {form} = {shape[1:]}, got {array.shape}.")
                rows.append(np.ascontiguousarray(array))
        return rows

    @staticmethod
    def _layers_of(name: str, given: Any, num_layers: int, form: str = "[H, n, D]") -> list[Array]:
        if isinstance(given, DeviceTensor):
            given = given.numpy()
        if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes) or getattr(given, "ndim", 1) == 0:
            raise ShapeError(f"{name}: expected an array [L, {form[1:]}, or an array {form} per layer, got {type(given).__name__}.")
        if len(given) != num_layers:
            raise ShapeError(f"{name}: expected {num_layers} layers, got {len(given)}.")
        layers = [layer.numpy() if isinstance(layer, DeviceTensor) else layer for layer in given]
        for index, layer in enumerate(layers):
            if not isinstance(layer, np.ndarray):
                raise ShapeError(f"{name}[{index}]: expected an array {form}, got {type(layer).__name__}.")
        return layers

    def pin(self, seq: int, *, slot: int | None = None, stream: Any) -> int:
        """Keep a sequence in a slot, until it is unpinned or destroyed.

        Parameters
        ----------
        seq : int
            The id. The sequence is swapped in if it is swapped out.
        slot : int, optional
            The slot to move it to; without one it stays where it is. A sequence that waits in that slot moves to the slot that this
            one leaves, to a free one, or (with swapping) to the host. An active slot must be empty; there the length of the sequence
            is committed.
        stream : cuda.core.Stream
            Everything is ordered on it; the call waits if a sequence is moved.

        Returns
        -------
        int
            The slot that it is in. If the sequence is empty, its states there are zero.

        Raises
        ------
        CapacityError
            ``slot`` is in use; or there is no slot for this sequence, or for the one that has to leave ``slot``; or the host has no
            room. Nothing was changed.
        SlotError
            ``slot`` is out of range.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        entry = self._begin("pin", seq, stream)
        length = self._table.length(entry)
        if slot is None:
            slot = self._swapper.swap_in(entry, 0, stream=stream)
        else:
            slot = slot_index(slot, self._cache.max_batch_size)
            self._swapper.move(entry, slot, stream=stream)
        entry.pinned = True
        if not length and self._cache.states is not None:
            self._cache.states.reset_slots([slot], stream=stream)
        return slot

    def unpin(self, seq: int, *, stream: Any) -> None:
        """Let a sequence be moved again.

        It leaves an active slot at once. The contents of that slot stay, and belong to whoever made the slot active.

        Parameters
        ----------
        seq : int
            The id.
        stream : cuda.core.Stream
            Everything is ordered on it; the call waits if the sequence is moved.

        Raises
        ------
        CapacityError
            The sequence is in an active slot, no slot is free and, with swapping, the host has no room. Nothing was changed.
        SequenceError
            The sequence is unknown, destroyed or lost.
        LengthsUnknown
            The sequence is in an active slot, and only the device knows its length.
        PlaceError, CaptureError, ClosedError
            The stream is of another memory or captured in a CUDA graph, or something is closed.
        """
        entry = self._begin("unpin", seq, stream)
        self._table.length(entry)
        if self._table.is_active(entry):
            self._swapper.leave_active_slot(entry, stream=stream)
        self._table.mark_used(entry)
        entry.pinned = False

    def _begin(self, what: str, seq: int, stream: Any, *, needs_no_states: bool = False) -> SequenceEntry:
        """Return the sequence that an operation is about, after the checks that all operations have in common."""
        self._check_open()
        entry = self._table.find(seq)
        if self._slot_format.has_states and needs_no_states:
            raise ConfigError(
                f"{what}: the cache has recurrent layers, whose states only an engine can update. Pin the sequence and run it."
            )
        refuse_capture(self._memory, what, stream, because="it waits for the device")
        return entry

    def _keep_states(self, slot: int, *, stream: Any) -> None:
        """Copy the current states of a slot that leaves the active batch to the next ones, so that a swap does not lose them."""
        states = self._cache.states
        if states is not None and states.config.ping_pong:
            self._cache.keep_states(slot, stream=stream)

    def close(self) -> None:
        """Destroy all sequences and release their copies on the host. The cache stays open. Idempotent."""
        super().close()

    def _release(self) -> None:
        self._lengths.detach(self._follower)
        self._table.clear()
