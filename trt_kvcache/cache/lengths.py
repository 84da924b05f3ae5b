"""``Lengths``: how many tokens each slot holds. Device tensor, host mirror and active batch size in one object."""

import os
import weakref
from collections.abc import Sequence
from operator import add
from typing import Any

import numpy as np

from trt_kvcache._util.checks import as_int, int_in_range, slot_index
from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.cache.slot_contents import SlotContents
from trt_kvcache.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DTypeError,
    LengthsUnknown,
    MappingError,
    PlaceError,
    RangeError,
    ShapeError,
)
from trt_kvcache.kernels import AnyCompactionPlan, CompactionPlan, compact_length_tensor, increment_length_tensor, store_length_values
from trt_kvcache.kernels.layer_views import check_memory
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.graph_capture import refuse_capture
from trt_kvcache.memory.shapes import MAX_DIMENSION, align_up, dense_nbytes
from trt_kvcache.memory.tensor import DeviceTensor

_VALUES = (Sequence, np.ndarray)

#: Set it to 1 to have device mappings of compactions read back, which waits, and checked.
DEBUG_VARIABLE = "TRT_KVCACHE_DEBUG"


def _host_values(what: str, values: Any) -> list[int]:
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


class Lengths(Uncopyable):
    """Sequence lengths of the slots: int32 ``[B]`` on the device, a mirror on the host, and A, the active batch size.

    The mirror is exact while the host knows every change. After a commit of a device tensor, or a compaction by a device mapping, it is an
    upper bound, until :meth:`sync_lengths`. Every change is checked against the mirror before anything is written. Not thread-safe.

    The managers that share a ``Lengths`` share its slots: K, V and states of all of them are compacted together, and states
    of slots that become empty are zeroed in all of them, whichever manager was asked.

    ``stream`` is a cuda.core.Stream: work is ordered on it, and calls do not wait, unless it is said. Wrong arguments,
    capturing streams and closed objects raise as :mod:`trt_kvcache.errors` says.

    Raises ConfigError or CapacityError: a size is out of range, or there is no room.

    Parameters
    ----------
    max_batch_size, max_sequence_length
        B and S.
    memory
        Where the tensor is allocated, as zeros. The constructor waits for that.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int, *, memory: Memory) -> None:
        self._max_batch_size = int_in_range("max_batch_size", max_batch_size, 1, MAX_DIMENSION, error=ConfigError)
        self._max_sequence_length = int_in_range("max_sequence_length", max_sequence_length, 1, MAX_DIMENSION, error=ConfigError)
        self._memory = memory
        stream = memory.create_stream()
        self._allocation = memory.allocate(self.nbytes_for(self._max_batch_size), zeroed=True, stream=stream)
        try:
            memory.synchronize(stream)
        except BaseException:
            self._allocation.close()
            raise
        self._tensor = DeviceTensor(self._allocation, shape=(self._max_batch_size,), dtype="int32")
        self._active_tensor = self._tensor[0:0]
        self._bounds: list[int] = []
        self._exact: list[bool] = []
        self._attached: list[weakref.ref[SlotContents]] = []

    @staticmethod
    def nbytes_for(max_batch_size: int) -> int:
        """Return the bytes that the lengths of B slots take, padded to 256."""
        return align_up(dense_nbytes((max_batch_size,), "int32"))

    @property
    def max_batch_size(self) -> int:
        """Slots, B."""
        return self._max_batch_size

    @property
    def max_sequence_length(self) -> int:
        """Tokens a slot can hold, S."""
        return self._max_sequence_length

    @property
    def memory(self) -> Memory:
        """Where the tensor lives."""
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes as allocated."""
        return self._allocation.nbytes

    @property
    def tensor(self) -> DeviceTensor:
        """All lengths, int32 ``[B]`` on the device: what ``kvcache_start_index`` is bound to. Its address never changes."""
        return self._tensor

    @property
    def active_tensor(self) -> DeviceTensor:
        """The lengths of the active slots, int32 ``[A]`` on the device."""
        return self._active_tensor

    @property
    def active_batch_size(self) -> int:
        """Active slots, A: they are 0 to A-1."""
        return len(self._bounds)

    @property
    def upper_bounds(self) -> tuple[int, ...]:
        """For each active slot a length that it does not exceed; its length where the mirror is exact."""
        return tuple(self._bounds)

    @property
    def host(self) -> tuple[int, ...]:
        """The lengths of the active slots, as the host knows them.

        Raises LengthsUnknown: a device tensor was committed, or a device mapping compacted, since; call ``sync_lengths``.
        """
        self._check_exact(range(len(self._exact)))
        return tuple(self._bounds)

    def of_slot(self, slot: int) -> int:
        """Return the length of one active slot, as the host knows it. Raises :class:`LengthsUnknown` as :attr:`host` does."""
        index = slot_index(slot, len(self._bounds), of="active slots")
        self._check_exact([index])
        return self._bounds[index]

    def is_exact(self, slot: int) -> bool:
        """Whether the host knows the length of an active slot, and not only a bound."""
        return self._exact[slot_index(slot, len(self._exact), of="active slots")]

    def _check_exact(self, slots: Sequence[int]) -> None:
        unknown = [slot for slot in slots if not self._exact[slot]]
        if unknown:
            raise LengthsUnknown(
                f"the lengths of slots {unknown} were changed by values that only the device has. Call sync_lengths(stream=) to read them."
            )

    @property
    def all_empty(self) -> bool:
        """Whether every active slot is known to hold no token. True without active slots."""
        return not any(self._bounds)

    def attach(self, contents: SlotContents) -> None:
        """Let ``contents`` follow these lengths, until :meth:`detach` or until nobody else refers to it."""
        self._attached.append(weakref.ref(contents))

    def detach(self, contents: SlotContents) -> None:
        """Let ``contents`` follow no longer. One that does not follow is ignored."""
        self._attached = [reference for reference in self._attached if reference() not in (None, contents)]

    def contents(self) -> list[SlotContents]:
        """Return what follows these lengths."""
        return [contents for reference in self._attached if (contents := reference()) is not None]

    @property
    def is_recurrent(self) -> bool:
        """Whether slots hold recurrent states, so that :meth:`rewind` is refused."""
        return any(contents.is_recurrent for contents in self.contents())

    def _resize(self, lengths: list[int], stream: Any) -> None:
        """Say which slots leave or enter, before the mirror moves."""
        if len(lengths) != len(self._bounds):
            for contents in self.contents():
                contents.resize(lengths, stream=stream)

    def _reset_slots(self, slots: Sequence[int], stream: Any) -> None:
        for contents in self.contents() if slots else ():
            contents.reset_slots(slots, stream=stream)

    def reset(self, reuse_lengths: Any, *, stream: Any) -> None:
        """Make ``len(reuse_lengths)`` slots active, with these lengths: as ``SlotCache.reset_for_new_sequences``."""
        self._check_open()
        values = _host_values("reuse_lengths", reuse_lengths)
        if len(values) > self._max_batch_size:
            raise RangeError(f"reuse_lengths: expected at most max_batch_size={self._max_batch_size} lengths, got {len(values)}.")
        if values and not 0 <= min(values) <= max(values) <= self._max_sequence_length:
            for slot, length in enumerate(values):
                int_in_range(f"reuse_lengths[{slot}]", length, 0, self._max_sequence_length)
        refuse_capture(self._memory, "reset_for_new_sequences", stream)
        self._resize(values, stream)
        active = self._active_tensor if len(values) == len(self._active_tensor) else self._tensor[: len(values)]
        store_length_values(active, values, accumulate=False, stream=stream)
        if self._attached:
            self._reset_slots([slot for slot, length in enumerate(values) if not length], stream)
        self._active_tensor = active
        self._bounds = values
        self._exact = [True] * len(values)

    def commit(self, increment: Any, *, max_increment: int | None = None, stream: Any) -> None:
        """Add to the lengths of the active slots: as :meth:`~trt_kvcache.cache.slot_cache.SlotCache.commit_sequence_length`."""
        self._check_open()
        if isinstance(increment, DeviceTensor):
            self._commit_tensor(increment, max_increment, stream)
            return
        if max_increment is not None:
            raise RangeError("max_increment: expected with a device tensor only; the host knows the values it was given.")
        if isinstance(increment, _VALUES) and not (isinstance(increment, np.ndarray) and increment.ndim == 0):
            self._commit_values(_host_values("increment", increment), stream)
        else:
            self._commit_scalar(int_in_range("increment", increment, 0), stream)

    def _commit_scalar(self, increment: int, stream: Any) -> None:
        capturing = self._memory.is_capturing(stream)
        after = self._bounds if capturing else self._bounds_after([increment] * len(self._bounds))
        increment_length_tensor(self._active_tensor, increment, stream=stream)
        self._bounds = after

    def _commit_values(self, values: list[int], stream: Any) -> None:
        if len(values) != len(self._bounds):
            raise ShapeError(f"increment: expected one value for each of {len(self._bounds)} active slots, got {len(values)}.")
        if values and min(values) < 0:
            for slot, value in enumerate(values):
                int_in_range(f"increment[{slot}]", value, 0)
        after = self._bounds_after(values)
        refuse_capture(self._memory, "commit_sequence_length with host values", stream)
        store_length_values(self._active_tensor, values, accumulate=True, stream=stream)
        self._bounds = after

    def _commit_tensor(self, increments: DeviceTensor, max_increment: int | None, stream: Any) -> None:
        if max_increment is None:
            raise RangeError("max_increment: expected with a device tensor, whose values the host does not know.")
        limit = int_in_range("max_increment", max_increment, 0)
        check_memory("increment", increments, self._memory)
        if increments.dtype != "int32":
            raise DTypeError(f"increment: expected int32, got {increments.dtype}.")
        if increments.shape != (len(self._bounds),):
            raise ShapeError(f"increment: expected shape ({len(self._bounds)},), one per active slot, got {increments.shape}.")
        capturing = self._memory.is_capturing(stream)
        after = self._bounds if capturing else self._bounds_after([limit] * len(self._bounds))
        increment_length_tensor(self._active_tensor, increments, stream=stream)
        self._bounds = after
        if not capturing:
            self._exact = [False] * len(self._bounds)

    def replayed(self, increment: int, *, exact: bool = True) -> None:
        """Say that a captured commit is about to be replayed: check the capacity and move the mirror.

        Raises CapacityError: a slot would exceed ``max_sequence_length``: do not replay.

        Parameters
        ----------
        increment
            The captured scalar, or the ``max_increment`` of a captured device tensor.
        exact
            False for a device tensor: the mirror becomes a bound.
        """
        self._check_open()
        number = int_in_range("increment", increment, 0)
        self._bounds = self._bounds_after([number] * len(self._bounds))
        if not exact:
            self._exact = [False] * len(self._bounds)

    def set_active_batch_size(self, new_active_batch_size: int, *, stream: Any) -> None:
        """Keep the first slots, or add empty ones: as :meth:`~trt_kvcache.cache.slot_cache.SlotCache.set_active_batch_size`."""
        self._check_open()
        count = int_in_range("active batch size", new_active_batch_size, 0, self._max_batch_size)
        self._memory.check_stream(stream)
        active = len(self._bounds)
        if count > active:
            refuse_capture(self._memory, "set_active_batch_size", stream)
        bounds = self._bounds[:count] + [0] * (count - active)
        self._resize(bounds, stream)
        if count > active:
            store_length_values(self._tensor[active:count], [0] * (count - active), accumulate=False, stream=stream)
            self._reset_slots(range(active, count), stream)
        self._active_tensor = self._tensor[:count]
        self._bounds = bounds
        self._exact = self._exact[:count] + [True] * (count - active)

    def clear_slot(self, slot: int, *, stream: Any) -> None:
        """Empty an active slot: as :meth:`~trt_kvcache.cache.slot_cache.SlotCache.clear_slot`."""
        self._check_open()
        index = slot_index(slot, len(self._bounds), of="active slots")
        self._store_one(index, 0, "clear_slot", stream)
        self._reset_slots([index], stream)

    def rewind(self, slot: int, length: int, *, stream: Any) -> None:
        """Shorten an active slot to ``length`` tokens: as :meth:`~trt_kvcache.cache.slot_cache.SlotCache.rewind`."""
        self._check_open()
        index = slot_index(slot, len(self._bounds), of="active slots")
        if self.is_recurrent:
            raise ConfigError("rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot.")
        if not self._exact[index]:
            raise LengthsUnknown(f"rewind: only the device knows the length of slot {index}. Call sync_lengths(stream=) before.")
        wanted = as_int("length", length)
        if not 0 <= wanted <= self._bounds[index]:
            raise RangeError(f"rewind: slot {index} holds {self._bounds[index]} tokens; expected 0 to {self._bounds[index]}, got {wanted}.")
        self._store_one(index, wanted, "rewind", stream)

    def compact(self, batch_mapping: Any, old_batch: int, new_batch: int, *, stream: Any) -> None:
        """Move the slots that are kept to the front: as :meth:`~trt_kvcache.cache.slot_cache.SlotCache.compact_batch`.

        A device mapping is not read, unless the environment has ``TRT_KVCACHE_DEBUG=1``, which waits. If it is captured, the mirror and
        the active batch size stay, and whoever replays calls :meth:`replayed_compaction`.
        """
        self._check_open()
        old = self._check_old_batch(old_batch)
        if isinstance(batch_mapping, DeviceTensor):
            self._compact_by_device(batch_mapping, old, int_in_range("new_batch", new_batch, 0, old), stream)
            return
        plan = CompactionPlan.from_host(batch_mapping, old, new_batch, self._bounds)
        refuse_capture(self._memory, "compact_batch with a host mapping", stream)
        self._move(plan, stream)
        sources = {int(new): slot for slot, new in enumerate(batch_mapping)}
        bounds = [self._bounds[sources[slot]] for slot in range(plan.new_batch)]
        self._resize(bounds, stream)
        self._bounds = bounds
        self._exact = [self._exact[sources[slot]] for slot in range(plan.new_batch)]
        self._active_tensor = self._tensor[: plan.new_batch]

    def _compact_by_device(self, mapping: DeviceTensor, old: int, new: int, stream: Any) -> None:
        plan = CompactionPlan.from_device(mapping, old, new, self._active_tensor)
        if self._memory.is_capturing(stream):
            self._move(plan, stream)
            return
        if os.environ.get(DEBUG_VARIABLE) == "1":
            self._check_mapping(mapping, new, stream)
        self._move(plan, stream)
        self._resize([0] * new, stream)
        self._drop_some(new)

    def replayed_compaction(self, old_batch: int, new_batch: int) -> None:
        """Say that a captured compaction is about to be replayed: check the active batch size, and move it and the mirror.

        Raises MappingError: ``old_batch`` is not the active batch size: do not replay.

        Parameters
        ----------
        old_batch, new_batch
            As captured.
        """
        self._check_open()
        old = self._check_old_batch(old_batch)
        self._drop_some(int_in_range("new_batch", new_batch, 0, old))

    def _check_old_batch(self, old_batch: Any) -> int:
        number = as_int("old_batch", old_batch)
        if number != len(self._bounds):
            raise MappingError(f"compact_batch: expected old_batch={len(self._bounds)}, the active batch size, got {number}.")
        return number

    def _check_mapping(self, mapping: DeviceTensor, new_batch: int, stream: Any) -> None:
        """Read a device mapping and raise :class:`MappingError` if it is not valid, or changes the order of slots."""
        self._memory.synchronize(stream)
        slots = self._memory.read(mapping)
        CompactionPlan.from_host(slots, len(slots), new_batch, self._bounds)
        kept = [int(slot) for slot in slots if slot >= 0]
        if kept != sorted(kept):
            raise MappingError(f"batch_mapping: a mapping on the device must keep the order of the slots, got {slots.tolist()}.")

    def _move(self, plan: AnyCompactionPlan, stream: Any) -> None:
        if plan.is_identity:
            self._memory.check_stream(stream)
            return
        for contents in self.contents():
            contents.compact(plan, stream=stream)
        compact_length_tensor(self._active_tensor, plan, stream=stream)

    def _drop_some(self, new_batch: int) -> None:
        """Move the mirror after a compaction by the device: which slots went is not known, only that the order was kept."""
        dropped = len(self._bounds) - new_batch
        self._bounds = [max(self._bounds[slot : slot + dropped + 1]) for slot in range(new_batch)]
        self._exact = [False] * new_batch
        self._active_tensor = self._tensor[:new_batch]

    def sync_lengths(self, *, stream: Any) -> None:
        """Read the lengths from the device into the mirror. Waits for ``stream``.

        Raises LengthsUnknown: the device holds a length outside 0 to S: a committed tensor exceeded its ``max_increment``. The mirror
        stays.
        """
        self._check_open()
        refuse_capture(self._memory, "sync_lengths", stream, because="it waits for the device")
        self._memory.synchronize(stream)
        values = [int(value) for value in self._memory.read(self._active_tensor)]
        for slot, value in enumerate(values):
            if not 0 <= value <= self._max_sequence_length:
                raise LengthsUnknown(
                    f"slot {slot}: expected a length from 0 to {self._max_sequence_length} on the device, got {value}. "
                    "A committed tensor exceeded its max_increment; reset the slots."
                )
        self._bounds = values
        self._exact = [True] * len(values)

    def close(self) -> None:
        """Release the tensor. Idempotent."""
        self._allocation.close()

    def _check_open(self) -> None:
        if self._allocation.closed:
            raise ClosedError("these Lengths are closed.")

    def _store_one(self, slot: int, length: int, what: str, stream: Any) -> None:
        refuse_capture(self._memory, what, stream)
        store_length_values(self._tensor[slot : slot + 1], [length], accumulate=False, stream=stream)
        self._bounds[slot] = length
        self._exact[slot] = True

    def _bounds_after(self, increments: Sequence[int]) -> list[int]:
        """Return the bounds with increments added; raise :class:`CapacityError` where one exceeds S."""
        after = list(map(add, self._bounds, increments))
        if after and max(after) > self._max_sequence_length:
            slot = next(slot for slot, bound in enumerate(after) if bound > self._max_sequence_length)
            holds = "holds" if self._exact[slot] else "holds at most"
            hint = "" if self._exact[slot] else " Call sync_lengths(stream=) to learn its exact length."
            raise CapacityError(
                f"slot {slot} {holds} {self._bounds[slot]} tokens; committing {increments[slot]} more exceeds "
                f"max_sequence_length={self._max_sequence_length}. Nothing was changed.{hint}"
            )
        return after
