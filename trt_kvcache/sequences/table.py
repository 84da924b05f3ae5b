"""``SequenceTable``: which sequence is in which slot, and which was used longest ago. Bookkeeping on the host only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from trt_kvcache._util.checks import as_int
from trt_kvcache.cache.lengths import Lengths
from trt_kvcache.errors import SequenceError
from trt_kvcache.kernels import AnyCompactionPlan, CompactionPlan
from trt_kvcache.sequences.slot_storage import SavedSlot


@dataclass(eq=False)
class SequenceEntry:
    """One sequence.

    ``slot``: None while it is swapped out.
    ``length``: Tokens, where the slot is not active. :meth:`SequenceTable.length` asks who knows.
    ``exact``: Else ``length`` is an upper bound, and the device has the length.
    ``pinned``: Asked for by ``pin``.
    ``saved``: What it holds, while it is swapped out and not empty.
    """

    id: int
    slot: int | None
    length: int = 0
    exact: bool = True
    pinned: bool = False
    saved: SavedSlot | None = None


class SequenceTable:
    """Sequences over the slots of a cache. It follows what the cache's owner does: :class:`~trt_kvcache.cache.slot_contents.SlotContents`.

    ``lengths``: Of the cache. Slots that are active there belong to whoever made them active; free ones are the others without a sequence.
    ``keep_states``: callable. ``keep_states(slot, stream=)`` is called before a slot with tokens leaves the active batch.
    """

    is_recurrent = False

    def __init__(self, lengths: Lengths, keep_states: Callable[..., None]) -> None:
        self._lengths = lengths
        self._keep_states = keep_states
        self._next_id = 0
        #: In the order of use, longest ago first.
        self._entries: dict[int, SequenceEntry] = {}
        #: Sequences whose slot somebody else has taken, until they are destroyed.
        self._taken: set[int] = set()

    def __iter__(self) -> Iterator[SequenceEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, slot: int | None) -> SequenceEntry:
        """Add a sequence without tokens. Its id is new."""
        entry = SequenceEntry(self._next_id, slot)
        self._next_id += 1
        self._entries[entry.id] = entry
        return entry

    def find(self, seq: int) -> SequenceEntry:
        """Return a sequence by its id, or raise :class:`SequenceError`."""
        number = as_int("sequence", seq, error=SequenceError)
        entry = self._entries.get(number)
        if entry is None:
            raise SequenceError(f"sequence {number}: {self._why_missing(number)}")
        return entry

    def _why_missing(self, number: int) -> str:
        if number in self._taken:
            return "its slot was taken by whoever runs the cache, and its tokens are gone. Pin a sequence after its slot was made active."
        if 0 <= number < self._next_id:
            return "it was destroyed."
        return "expected an id that create_sequence returned."

    def use(self, entry: SequenceEntry) -> None:
        """Make it the one that was used last."""
        self._entries[entry.id] = self._entries.pop(entry.id)

    def remove(self, seq: int) -> None:
        """Forget a sequence, which somebody else may have taken. Raises :class:`SequenceError` where there is none."""
        number = as_int("sequence", seq, error=SequenceError)
        if number in self._taken:
            self._taken.remove(number)
        else:
            del self._entries[self.find(number).id]

    def clear(self) -> None:
        """Forget all sequences."""
        self._entries.clear()
        self._taken.clear()

    def at(self, slot: int) -> SequenceEntry | None:
        """Return the sequence in a slot."""
        return next((entry for entry in self if entry.slot == slot), None)

    def free_slots(self) -> list[int]:
        """Return the slots that are neither active nor hold a sequence, the last one first: the first ones are made active first."""
        held = {entry.slot for entry in self}
        return [slot for slot in reversed(range(self._lengths.active_batch_size, self._lengths.max_batch_size)) if slot not in held]

    def is_active(self, entry: SequenceEntry) -> bool:
        """Whether the sequence is in an active slot."""
        return entry.slot is not None and entry.slot < self._lengths.active_batch_size

    def is_movable(self, entry: SequenceEntry) -> bool:
        """Whether the sequence is in a slot that it may be moved out of: it is not pinned, and the slot is not active."""
        return entry.slot is not None and not entry.pinned and not self.is_active(entry)

    def movable(self, *, but: SequenceEntry | None = None) -> list[SequenceEntry]:
        """Return the movable sequences except one, used longest ago first."""
        return [entry for entry in self if entry is not but and self.is_movable(entry)]

    def length(self, entry: SequenceEntry) -> int:
        """Return the tokens of a sequence, and note them. Waits for the device where only it knew them when the slot left the batch.

        Raises :class:`LengthsUnknown` where the slot is active, and only the device knows.
        """
        if entry.slot is not None and self.is_active(entry):
            entry.length = self._lengths.of_slot(entry.slot)
        elif entry.slot is not None and not entry.exact:
            entry.length = int(self._lengths.memory.read(self._lengths.tensor[entry.slot : entry.slot + 1])[0])
        entry.exact = True
        return entry.length

    def resize(self, lengths: Sequence[int], *, stream: Any) -> None:
        """Note the tokens of sequences whose slots leave. In slots that enter, empty ones stay, as do pinned ones that get tokens."""
        before, after = self._lengths.active_batch_size, len(lengths)
        for entry in [entry for entry in self if entry.slot is not None]:
            slot = entry.slot
            assert slot is not None
            if after <= slot < before:
                length = self._lengths.upper_bounds[slot]
                if length:
                    self._keep_states(slot, stream=stream)
                entry.length, entry.exact = length, self._lengths.is_exact(slot)
            elif before <= slot < after and (not entry.pinned if lengths[slot] else entry.length):
                self._take(entry)

    def start_anew(self, slots: Sequence[int], *, stream: Any) -> None:
        """Do nothing: slots in the active batch hold what its lengths say."""

    def compact(self, plan: AnyCompactionPlan, *, stream: Any) -> None:
        """Follow the slots. A sequence whose slot was overwritten is gone, as are active ones where only the device knows."""
        if isinstance(plan, CompactionPlan):
            origins = {slot: slot for slot in range(plan.old_batch)}
            for step in chain.from_iterable(plan.move_lists):
                origins[step.destination] = origins[step.source]
            places = {origin: slot for slot, origin in origins.items() if slot == origin < plan.old_batch}
            places |= {origin: slot for slot, origin in origins.items() if slot != origin and slot < plan.old_batch}
        elif plan.new_batch == plan.old_batch:
            return
        else:
            places = {}
        for entry in [entry for entry in self if entry.slot is not None and entry.slot < plan.old_batch]:
            assert entry.slot is not None
            if entry.slot in places:
                entry.slot = places[entry.slot]
            else:
                self._take(entry)

    def _take(self, entry: SequenceEntry) -> None:
        del self._entries[entry.id]
        self._taken.add(entry.id)
