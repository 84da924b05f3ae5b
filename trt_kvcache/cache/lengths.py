"""``Lengths``: the number of tokens in each slot, and its changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int, int_in_range
from trt_kvcache.cache.device_known_changes import DeviceKnownChanges
from trt_kvcache.errors import ConfigError, DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import CompactionPlan, increment_length_tensor
from trt_kvcache.kernels.length_kernels import increment_scalar_kernel, store_values_kernel
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.tensor import DeviceTensor


class Lengths(DeviceKnownChanges):
    """Sequence lengths of the slots of one or more caches.

    An engine reads the int32 tensor ``[B]`` in the cache's memory. The host has a mirror of it, and checks every change against the
    mirror before anything is written. Slots 0 to A-1 are active. Not thread-safe.

    Caches that share a ``Lengths`` share its slots: K, V and states of all of them are compacted together, and states of slots that
    become empty are zeroed in all of them, whichever cache is asked.

    Parameters
    ----------
    max_batch_size : int
        Slots, B.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    memory : Memory
        Where the tensor is allocated, as zeros. The constructor waits for that.

    Raises
    ------
    ConfigError
        ``max_batch_size`` is not from 1 to 65535, or ``max_sequence_length`` not from 1 to the largest int32.
    PlaceError
        ``memory`` is not a memory.
    CapacityError
        The memory has no room for the tensor.

    Notes
    -----
    The mirror is exact while the host knows every change. After a commit of a device tensor, or a compaction by a device mapping,
    it is an upper bound until :meth:`sync_lengths`. Methods are stream-ordered; they neither wait nor allocate, except
    :meth:`sync_lengths`, and a reset or resize that activates the slot in which a sequence of a ``SequenceCacheManager`` waits. They
    raise :class:`~trt_kvcache.errors.PlaceError` for a stream of another memory and :class:`~trt_kvcache.errors.ClosedError` once the
    lengths are closed. If a method raises, nothing was changed.

    Examples
    --------
    >>> from trt_kvcache import HostMemory, Lengths
    >>> memory = HostMemory()
    >>> stream = memory.create_stream()
    >>> lengths = Lengths(max_batch_size=4, max_sequence_length=256, memory=memory)
    >>> lengths.reset([0, 5, 0], stream=stream)
    >>> lengths.commit(7, stream=stream)
    >>> lengths.host
    (7, 12, 7)
    >>> lengths.compact([0, -1, 1], 3, 2, stream=stream)
    >>> lengths.active_tensor.numpy()
    array([7, 7], dtype=int32)
    """

    def reset(self, reuse_lengths: Sequence[int] | np.ndarray[Any, Any], *, stream: Any) -> None:
        """Make ``n = len(reuse_lengths)`` slots active, with these lengths. States of slots of length 0 are zeroed.

        Parameters
        ----------
        reuse_lengths : sequence of int, or NumPy integer array (n,)
            Tokens that each slot already holds, ``0 <= length <= S``; ``0 <= n <= B``.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        RangeError, ShapeError, DTypeError, PlaceError
            ``reuse_lengths`` does not fit.
        CaptureError
            The stream is capturing: the values would be frozen into the CUDA graph.
        CapacityError
            A sequence of a ``SequenceCacheManager`` waits in a slot that becomes active, and cannot move to another place.
        """
        self._check_open()
        after = self._mirror.after_reset(_host_integers("reuse_lengths", reuse_lengths))
        refuse_capture(self._memory, "reset_for_new_sequences", stream)
        lengths = after.upper_bounds
        self._announce(lengths, stream)
        store_values_kernel(self._first(len(lengths)), lengths, False, stream)
        if self._contents:
            self._reset_slots([slot for slot, length in enumerate(lengths) if not length], stream)
        self._mirror = after

    def commit(
        self, increment: int | Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, *, max_increment: int | None = None, stream: Any
    ) -> None:
        """Add to the lengths of the active slots.

        Parameters
        ----------
        increment : int, sequence of int (A,), NumPy integer array (A,), or DeviceTensor (A,) int32
            Tokens to add: a number to all active slots, other values one to each.
        max_increment : int, optional
            Upper bound of the values of a device tensor, which the host does not know. Required with one, else not allowed.
        stream : cuda.core.Stream or GraphBuilder
            The launch is ordered on it. A number and a device tensor can be captured in a CUDA graph. The mirror then stays as
            it is; call :meth:`replayed` before each replay of the graph.

        Raises
        ------
        CapacityError
            A slot would exceed S tokens.
        RangeError, ShapeError, DTypeError, PlaceError
            An argument does not fit.
        CaptureError
            The stream is capturing, and ``increment`` is a sequence or array on the host.
        """
        self._check_open()
        if isinstance(increment, DeviceTensor):
            self._commit_tensor(increment, max_increment, stream)
            return
        if max_increment is not None:
            raise RangeError("max_increment: expected with a device tensor only; the host knows the values it was given.")
        if isinstance(increment, Sequence) or (isinstance(increment, np.ndarray) and increment.ndim):
            after = self._mirror.after_commit(values := _host_integers("increment", increment))
            refuse_capture(self._memory, "commit_sequence_length with host values", stream)
            store_values_kernel(self.active_tensor, values, True, stream)
        else:
            number = int_in_range("increment", increment, 0)
            if self._memory.is_capturing(stream):
                increment_length_tensor(self.active_tensor, number, stream=stream)  # checked: no capacity bounds the number here
                return
            after = self._mirror.after_commit((number,) * len(self._mirror.upper_bounds))
            increment_scalar_kernel(self.active_tensor, number, stream)
        self._mirror = after

    def set_active_batch_size(self, new_active_batch_size: int, *, stream: Any) -> None:
        """Keep the first slots, or add slots of length 0 with zeroed states.

        Parameters
        ----------
        new_active_batch_size : int
            Active slots from now on, ``0 <= n <= B``.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        RangeError
            ``new_active_batch_size`` is not from 0 to B.
        CaptureError
            The stream is capturing, and slots are added.
        CapacityError
            A sequence of a ``SequenceCacheManager`` waits in a slot that becomes active, and cannot move to another place.
        """
        self._check_open()
        after = self._mirror.after_resize(new_active_batch_size)
        self._memory.check_stream(stream)
        before, count = self.active_batch_size, after.active_batch_size
        if count > before:
            refuse_capture(self._memory, "set_active_batch_size", stream)
        self._announce(after.upper_bounds, stream)
        if count > before:
            store_values_kernel(self._tensor[before:count], [0] * (count - before), False, stream)
            self._reset_slots(range(before, count), stream)
        self._mirror = after

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Set the length of an active slot to 0 and its states to zero.

        Parameters
        ----------
        slot : int
            An active slot.
        stream : cuda.core.Stream
            The writes are ordered on it.

        Raises
        ------
        SlotError
            The slot is not active.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        after = self._mirror.after_clear(slot)
        self._store_one(int(slot), 0, "clear_slot", stream)
        self._reset_slots([int(slot)], stream)
        self._mirror = after

    def rewind(self, slot: int, length: int, *, stream: Any) -> None:
        """Shorten an active slot to its first ``length`` tokens.

        Parameters
        ----------
        slot : int
            An active slot.
        length : int
            Tokens to keep, at most the present length.
        stream : cuda.core.Stream
            The write is ordered on it.

        Raises
        ------
        ConfigError
            The slots hold recurrent states, which cannot go back to an earlier token.
        SlotError, RangeError
            The slot is not active, or holds fewer tokens.
        LengthsUnknown
            Only the device knows the length of the slot.
        CaptureError
            The stream is capturing.
        """
        self._check_open()
        index = self._mirror.slot_index(slot)
        if self.is_recurrent:
            raise ConfigError("rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot.")
        after = self._mirror.after_rewind(index, length)
        self._store_one(index, after.upper_bounds[index], "rewind", stream)
        self._mirror = after

    def _store_one(self, slot: int, length: int, what: str, stream: Any) -> None:
        refuse_capture(self._memory, what, stream)
        store_values_kernel(self._tensor[slot : slot + 1], [length], False, stream)

    def compact(
        self, batch_mapping: Sequence[int] | np.ndarray[Any, Any] | DeviceTensor, old_batch: int, new_batch: int, *, stream: Any
    ) -> None:
        """Move the kept slots to the front: lengths, and K, V and states of every cache that shares them.

        Parameters
        ----------
        batch_mapping : sequence of int, NumPy integer array (old_batch,), or DeviceTensor (old_batch,) int32
            New slot of each old slot, or -1 to drop it. On the host any permutation, which is checked completely. A mapping on the
            device must keep the order of the slots. It is not read, unless the environment has ``TRT_KVCACHE_DEBUG=1``, which
            waits for the device; afterwards the mirror has upper bounds only.
        old_batch, new_batch : int
            Active slots before and after, ``0 <= new_batch <= old_batch``.
        stream : cuda.core.Stream or GraphBuilder
            The launches are ordered on it. With a device mapping they can be captured in a CUDA graph. The mirror and the active
            batch size then stay as they are; call :meth:`replayed_compaction` before each replay of the graph.

        Raises
        ------
        MappingError
            ``old_batch`` is not the active batch size, entries are missing, out of range or duplicated, or the kept slots do not fill
            ``0..new_batch-1``.
        RangeError, ShapeError, DTypeError, PlaceError
            An argument does not fit.
        CaptureError
            The stream is capturing, and the mapping is on the host.
        """
        self._check_open()
        old = self._mirror.check_old_batch(old_batch)
        if isinstance(batch_mapping, DeviceTensor):
            self._compact_by_device_mapping(batch_mapping, old, int_in_range("new_batch", new_batch, 0, old), stream)
            return
        plan = CompactionPlan.from_host(batch_mapping, old, new_batch, self._mirror.upper_bounds)
        refuse_capture(self._memory, "compact_batch with a host mapping", stream)
        after = self._mirror.after_compaction(batch_mapping, plan.new_batch)
        self._move(plan, stream)
        self._announce(after.upper_bounds, stream)
        self._mirror = after


def _host_integers(what: str, values: Any) -> list[int]:
    """Return integers that the host has as a list, or raise an error that names ``what``."""
    if isinstance(values, DeviceTensor):
        raise PlaceError(f"{what}: expected int32 values on the host, got {values!r}.")
    if isinstance(values, str | bytes):
        raise DTypeError(f"{what}: expected int32 values on the host, got {type(values).__name__}.")
    if isinstance(values, Sequence):
        if all(type(value) is int for value in values):
            return list(values)
        return [as_int(f"{what}[{index}]", value, error=RangeError) for index, value in enumerate(values)]
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{what}: expected int32 values on the host, got {array.dtype}.")
    if array.ndim != 1:
        raise ShapeError(f"{what}: expected shape (n,), got {array.shape}.")
    return [int(value) for value in array]
