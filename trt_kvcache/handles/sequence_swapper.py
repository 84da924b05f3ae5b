"""``SequenceSwapper``: moves sequences between slots and the host, with their states."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.cache.cache import Cache
from trt_kvcache.errors import CapacityError
from trt_kvcache.handles.sequence_table import SequenceEntry, SequenceTable
from trt_kvcache.kernels import AnyCompactionPlan
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.slot_format import SlotFormat


class SequenceSwapper:
    """Moves the sequences of a table between the slots of a cache and the host."""

    def __init__(self, table: SequenceTable, cache: Cache, *, threshold: float | None) -> None:
        self._table = table
        self._cache = cache
        self._lengths = lengths = cache.lengths
        self._slot_format = SlotFormat.of(cache)
        self._threshold = threshold
        #: Bytes of tokens and states in the slots when all are full.
        self.capacity = lengths.max_batch_size * self._live_nbytes(lengths.max_sequence_length)

    @property
    def enabled(self) -> bool:
        """True if sequences may be swapped out."""
        return self._threshold is not None

    @property
    def used(self) -> int:
        """Bytes of live tokens and states: of active slots (upper bounds), and of sequences in the other slots."""
        waiting = [entry.length for entry in self._table if entry.slot is not None and not self._table.is_active(entry)]
        return sum(self._live_nbytes(length) for length in (*self._lengths.upper_bounds, *waiting))

    def _live_nbytes(self, length: int) -> int:
        return self._slot_format.live_nbytes(length)

    def swap_in(self, entry: SequenceEntry, new_tokens: int, *, stream: Any) -> int:
        """Return the slot of a sequence, swapped in if it is on the host, with room for ``new_tokens``."""
        grown = self._live_nbytes(entry.length + new_tokens) - (0 if entry.slot is None else self._live_nbytes(entry.length))
        needs_slot = entry.slot is None and not self._table.free_slots()
        self._swap_out(self._victims(entry, grown, needs_slot), stream)
        self._table.mark_used(entry)
        if entry.slot is not None:
            return entry.slot
        slot = self._table.free_slots()[0]
        self._restore(entry, slot, stream)
        return slot

    def _victims(self, entry: SequenceEntry, grown: int, needs_slot: bool) -> list[SequenceEntry]:
        """Return the sequences to swap out so that ``entry`` gets a slot, or may grow by ``grown`` bytes: least recently used first."""
        candidates = self._table.movable(except_for=entry)
        if needs_slot and not candidates:
            raise CapacityError(f"sequence {entry.id} has no slot, and all slots are active or pinned. Nothing was changed.")
        victims = candidates[: int(needs_slot)]
        if self._threshold is not None:
            leaving = sum(self._live_nbytes(victim.length) for victim in victims)
            excess = self.used + grown - leaving - self._threshold * self.capacity
            for other in candidates[len(victims) :]:
                if excess > 0 and other.length:
                    victims.append(other)
                    excess -= self._live_nbytes(other.length)
        return victims

    def move(self, entry: SequenceEntry, slot: int, *, stream: Any) -> None:
        """Move a sequence into a given slot. In an active slot the length of the sequence is committed."""
        other = self._table.in_slot(slot)
        if other is entry:
            return
        if other is not None and not self._table.is_movable(other):
            raise CapacityError(f"slot {slot} holds sequence {other.id}, which is active or pinned. Nothing was changed.")
        if other is None and slot < self._lengths.active_batch_size and self._lengths.upper_bounds[slot]:
            raise CapacityError(f"slot {slot} is active and not empty. Clear it before. Nothing was changed.")
        left = [entry.slot] if entry.slot is not None and not self._table.is_active(entry) else []
        destinations = [*left, *self._table.free_slots()]
        if other is None:
            self._swap_out([entry], stream)
        elif destinations or self.enabled:
            self._swap_out([entry, other], stream)
            if destinations:
                self._restore(other, destinations[0], stream)
        else:
            raise CapacityError(f"sequence {other.id} must leave slot {slot}, and no other is free. Nothing was changed.")
        self._restore(entry, slot, stream)

    def make_way(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Move sequences out of slots that become active, to other slots or to the host: the owner of the cache will write there."""
        leaving = []
        for entry in self._table:
            if entry.slot is None or not self._lengths.active_batch_size <= entry.slot < len(lengths):
                continue
            if not entry.pinned and (entry.length or lengths[entry.slot]):
                leaving.append(entry)
            elif entry.pinned and entry.length and not lengths[entry.slot]:
                raise CapacityError(
                    f"slot {entry.slot} would become active and empty, but sequence {entry.id} is pinned there with tokens. "
                    "Reset the slot to the length of the sequence, or unpin it before. Nothing was changed."
                )
        free = [slot for slot in self._table.free_slots() if slot >= len(lengths)]
        if len(leaving) > len(free) and not self.enabled:
            raise CapacityError(
                f"slot {leaving[0].slot} would become active, but sequence {leaving[0].id} waits there, and no other slot is free. "
                "Pin it there and reset the slot to its length, destroy it, or enable swapping. Nothing was changed."
            )
        self._swap_out(leaving, stream)
        for entry, slot in zip(reversed(leaving), free, strict=False):  # the most recently used ones stay in the cache
            self._restore(entry, slot, stream)

    def leave_active_slot(self, entry: SequenceEntry, *, stream: Any) -> None:
        """Move a sequence out of its active slot, to a free slot or to the host. The slot keeps what it holds."""
        free = self._table.free_slots()
        if not free and not self.enabled:
            raise CapacityError(
                f"sequence {entry.id} is in active slot {entry.slot}, and no other slot is free. "
                "Shrink the active batch, or enable swapping. Nothing was changed."
            )
        self._swap_out([entry], stream)
        if free:
            self._restore(entry, free[0], stream)

    def _swap_out(self, entries: Sequence[SequenceEntry], stream: Any) -> None:
        """Copy all of these sequences to the host, then release their slots."""
        copies = [self._copy_to_host(entry, stream) for entry in entries]
        if copies:
            self._lengths.memory.synchronize(stream)
        for entry, copy in zip(entries, copies, strict=True):
            entry.slot, entry.saved = None, copy

    def _copy_to_host(self, entry: SequenceEntry, stream: Any) -> SlotCopy | None:
        length = self._table.length(entry)
        if entry.slot is None or not length:
            return entry.saved
        return SlotCopy.download(self._cache, entry.slot, length, stream=stream)

    def _restore(self, entry: SequenceEntry, slot: int, stream: Any) -> None:
        """Put a sequence that is swapped out into a free slot, or into an active and empty one."""
        if entry.saved is not None:
            waiting = slot >= self._lengths.active_batch_size
            entry.saved.upload(self._cache, slot, entry.saved.length, both_buffers=waiting, stream=stream)
            self._lengths.memory.synchronize(stream)
        entry.slot, entry.saved = slot, None
        if self._table.is_active(entry):
            active = range(self._lengths.active_batch_size)
            self._lengths.commit([entry.length if other == slot else 0 for other in active], stream=stream)


class SequenceFollower:
    """Updates the sequence table when the owner of the cache changes the active batch or compacts it: a ``SlotContents``."""

    is_recurrent = False

    def __init__(self, table: SequenceTable, swapper: SequenceSwapper) -> None:
        self._table = table
        self._swapper = swapper

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Move the sequences that wait in slots that enter out of them, and follow the change."""
        self._swapper.make_way(lengths, stream=stream)
        self._table.resize(lengths, stream=stream)

    def reset_slots(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: the cache's lengths count for sequences in active slots."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Follow the moves of a compaction."""
        self._table.compact(plan)
