"""``SequenceSwapper``: brings sequences into slots, and others out of them to the host, with all that a slot holds."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.errors import CapacityError
from trt_kvcache.sequences.sequence_table import SequenceEntry, SequenceTable
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.sequences.slot_transfer import SlotTransfer


class SequenceSwapper:
    """Moves the sequences of a table between slots and the host. Copies are ordered on ``stream``, and waited for.

    Before anything moves, everything that moves has been copied to the host: what fails by then has changed nothing, and
    later failures leave sequences on the host.

    ``transfer``: Of the same cache.
    ``lengths``: Of the same cache.
    ``threshold``: Share of the capacity past which sequences are swapped out; None for no swapping.
    """

    def __init__(self, table: SequenceTable, transfer: SlotTransfer, lengths: Lengths, *, threshold: float | None) -> None:
        self._table = table
        self._transfer = transfer
        self._lengths = lengths
        self._threshold = threshold
        #: Bytes of tokens and states in the slots when all are full.
        self.capacity = lengths.max_batch_size * self._live_nbytes(lengths.max_sequence_length)

    @property
    def enabled(self) -> bool:
        """Whether sequences may wait on the host."""
        return self._threshold is not None

    @property
    def used(self) -> int:
        """Bytes of live tokens and states in the slots: of active ones (upper bounds), and of sequences that wait in others."""
        waiting = [entry.length for entry in self._table if entry.slot is not None and not self._table.is_active(entry)]
        return sum(self._live_nbytes(length) for length in (*self._lengths.upper_bounds, *waiting))

    def _live_nbytes(self, length: int) -> int:
        return self._transfer.slot_format.live_nbytes(length)

    def bring_in(self, entry: SequenceEntry, new_tokens: int, *, stream: Any) -> int:
        """Return the slot of a sequence, brought into one if it has none, with room made for tokens that it will get.

        ``entry``: Of known length. It is the one used last from now on.
        ``stream``: cuda.core.Stream.

        Raises CapacityError: no slot is free or can be made free, or the host has no room. Nothing was changed.
        """
        grown = self._live_nbytes(entry.length + new_tokens) - (0 if entry.slot is None else self._live_nbytes(entry.length))
        needs_slot = entry.slot is None and not self._table.free_slots()
        self._send_out(self._victims(entry, grown, needs_slot), stream)
        self._table.use(entry)
        if entry.slot is not None:
            return entry.slot
        slot = self._table.free_slots()[0]
        self._place(entry, slot, stream)
        return slot

    def _victims(self, entry: SequenceEntry, grown: int, needs_slot: bool) -> list[SequenceEntry]:
        """Return the sequences that must go so that ``entry`` gets a slot, or may grow by bytes: used longest ago first."""
        candidates = self._table.movable(but=entry)
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
        """Bring a sequence of known length into a certain slot, where its length is committed if the slot is active.

        Another that waits there goes to the slot that this one leaves, to a free one, or to the host.

        Raises CapacityError: the slot is another's, there is no place for the sequence that waits there, or no room on the host. Nothing
        was changed.
        """
        other = self._table.at(slot)
        if other is entry:
            return
        if other is not None and not self._table.is_movable(other):
            raise CapacityError(f"slot {slot} holds sequence {other.id}, which is active or pinned. Nothing was changed.")
        if other is None and slot < self._lengths.active_batch_size and self._lengths.upper_bounds[slot]:
            raise CapacityError(f"slot {slot} is active and not empty. Clear it before. Nothing was changed.")
        left = [entry.slot] if entry.slot is not None and not self._table.is_active(entry) else []
        places = [*left, *self._table.free_slots()]
        if other is None:
            self._send_out([entry], stream)
        elif places or self.enabled:
            self._send_out([entry, other], stream)
            if places:
                self._place(other, places[0], stream)
        else:
            raise CapacityError(f"sequence {other.id} must leave slot {slot}, and no other is free. Nothing was changed.")
        self._place(entry, slot, stream)

    def leave(self, entry: SequenceEntry, *, stream: Any) -> None:
        """Move a sequence of known length out of its active slot, which keeps what it holds.

        Raises CapacityError: no slot is free, and without swapping there is no other place; or there is no room on the host. Nothing was
        changed.
        """
        free = self._table.free_slots()
        if not free and not self.enabled:
            raise CapacityError(
                f"sequence {entry.id} is in active slot {entry.slot}, and no other slot is free. "
                "Shrink the active batch, or enable swapping. Nothing was changed."
            )
        self._send_out([entry], stream)
        if free:
            self._place(entry, free[0], stream)

    def _send_out(self, entries: Sequence[SequenceEntry], stream: Any) -> None:
        saved = [self._save(entry, stream) for entry in entries]
        if saved:
            self._lengths.memory.synchronize(stream)
        for entry, contents in zip(entries, saved, strict=True):
            entry.slot, entry.saved = None, contents

    def _save(self, entry: SequenceEntry, stream: Any) -> SlotCopy | None:
        length = self._table.length(entry)
        if entry.slot is None or not length:
            return entry.saved
        return SlotCopy(self._transfer.slot_format, length, self._transfer.download(entry.slot, length, stream=stream))

    def _place(self, entry: SequenceEntry, slot: int, stream: Any) -> None:
        if entry.saved is not None:
            waiting = slot >= self._lengths.active_batch_size
            self._transfer.upload(entry.saved.arrays, slot, entry.saved.length, both_buffers=waiting, stream=stream)
            self._lengths.memory.synchronize(stream)
        entry.slot, entry.saved = slot, None
        if self._table.is_active(entry):
            active = range(self._lengths.active_batch_size)
            self._lengths.commit([entry.length if other == slot else 0 for other in active], stream=stream)
