"""``SequenceTable``: the slot of each sequence, and the order of their last use. Bookkeeping on the host only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trt_kvcache._util.checks import as_int
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.errors import SequenceError
from trt_kvcache.kernels import AnyCompactionPlan, CompactionPlan
from trt_kvcache.sequences.slot_copy import SlotCopy


@dataclass(eq=False)
class SequenceEntry:
    """One sequence."""

    id: int
    #: None on the host.
    slot: int | None
    #: Tokens; in an active slot the lengths of the cache count instead.
    length: int = 0
    #: False if the slot left the active batch while only the device knew its length: then `length` is an upper bound.
    exact: bool = True
    #: It must stay in its slot.
    pinned: bool = False
    #: The tokens of a sequence on the host; None if it is empty.
    saved: SlotCopy | None = None


class SequenceTable:
    """The sequences over the slots of one cache, in the order of their last use."""

    # `before_slot_leaves(slot, stream=)` is called before a slot with tokens of a sequence leaves the active batch.
    def __init__(self, lengths: Lengths, before_slot_leaves: Callable[..., None]) -> None:
        self._lengths = lengths
        self._before_slot_leaves = before_slot_leaves
        self._next_id = 0
        # The least recently used one first.
        self._entries: dict[int, SequenceEntry] = {}
        # Sequences whose slot was overwritten by the owner of the cache, until they are destroyed.
        self._lost_ids: set[int] = set()

    def __iter__(self) -> Iterator[SequenceEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, slot: int | None) -> SequenceEntry:
        """Add an empty sequence."""
        entry = SequenceEntry(self._next_id, slot)
        self._next_id += 1
        self._entries[entry.id] = entry
        return entry

    def find(self, seq: int) -> SequenceEntry:
        """Return a sequence by its id."""
        number = as_int("sequence", seq, error=SequenceError)
        entry = self._entries.get(number)
        if entry is None:
            raise SequenceError(f"sequence {number}: {self._why_missing(number)}")
        return entry

    def _why_missing(self, number: int) -> str:
        if number in self._lost_ids:
            return "a compaction took its slot for another one, and its tokens are gone. Unpin a sequence before its slot is dropped."
        if 0 <= number < self._next_id:
            return "it was destroyed."
        return "expected an id that create_sequence returned."

    def mark_used(self, entry: SequenceEntry) -> None:
        """Make a sequence the most recently used one."""
        self._entries[entry.id] = self._entries.pop(entry.id)

    def remove(self, seq: int) -> None:
        """Drop a sequence, also one whose tokens were lost."""
        number = as_int("sequence", seq, error=SequenceError)
        if number in self._lost_ids:
            self._lost_ids.remove(number)
        else:
            del self._entries[self.find(number).id]

    def clear(self) -> None:
        """Drop all sequences."""
        self._entries.clear()
        self._lost_ids.clear()

    def in_slot(self, slot: int) -> SequenceEntry | None:
        """Return the sequence that is in a slot."""
        return next((entry for entry in self if entry.slot == slot), None)

    def free_slots(self) -> list[int]:
        """Return the slots that are neither active nor hold a sequence."""
        held = {entry.slot for entry in self}
        return [slot for slot in reversed(range(self._lengths.active_batch_size, self._lengths.max_batch_size)) if slot not in held]

    def is_active(self, entry: SequenceEntry) -> bool:
        """Return True if a sequence is in an active slot."""
        return entry.slot is not None and entry.slot < self._lengths.active_batch_size

    def is_movable(self, entry: SequenceEntry) -> bool:
        """Return True if a sequence may be moved out of its slot."""
        return entry.slot is not None and not entry.pinned and not self.is_active(entry)

    def movable(self, *, except_for: SequenceEntry | None = None) -> list[SequenceEntry]:
        """Return the sequences that may be moved out of their slots, least recently used first."""
        return [entry for entry in self if entry is not except_for and self.is_movable(entry)]

    def length(self, entry: SequenceEntry) -> int:
        """Return the number of tokens of a sequence, and store it in the entry. Waits for the device if only that knows it."""
        if entry.slot is not None and self.is_active(entry):
            entry.length = self._lengths.of_slot(entry.slot)
        elif entry.slot is not None and not entry.exact:
            entry.length = int(self._lengths.memory.read(self._lengths.tensor[entry.slot : entry.slot + 1])[0])
        entry.exact = True
        return entry.length

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Follow a change of the active batch size, which is still the old one. Sequences in slots that leave keep their tokens."""
        for entry in self:
            slot = entry.slot
            if slot is not None and len(lengths) <= slot < self._lengths.active_batch_size:
                length = self._lengths.upper_bounds[slot]
                if length:
                    self._before_slot_leaves(slot, stream=stream)
                entry.length, entry.exact = length, self._lengths.is_exact(slot)

    def compact(self, plan: AnyCompactionPlan) -> None:
        """Follow the moves of a compaction."""
        if isinstance(plan, CompactionPlan):
            new_slots = _slots_after(plan)
        elif plan.new_batch == plan.old_batch:
            return
        else:
            new_slots = {}
        for entry in [entry for entry in self if entry.slot is not None and entry.slot < plan.old_batch]:
            assert entry.slot is not None
            if entry.slot in new_slots:
                entry.slot = new_slots[entry.slot]
            else:
                self._mark_lost(entry)

    def _mark_lost(self, entry: SequenceEntry) -> None:
        del self._entries[entry.id]
        self._lost_ids.add(entry.id)


def _slots_after(plan: CompactionPlan) -> dict[int, int]:
    """Return the new slot of each old one whose contents survive. A dropped slot survives in place if none is moved over it."""
    origins = {slot: slot for slot in range(plan.old_batch)}
    for move in chain.from_iterable(plan.move_lists):
        origins[move.destination] = origins[move.source]
    in_place = {origin: slot for slot, origin in origins.items() if slot == origin < plan.old_batch}
    moved = {origin: slot for slot, origin in origins.items() if slot != origin and slot < plan.old_batch}
    return in_place | moved
