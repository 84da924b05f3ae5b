"""``LengthMirror``: the lengths of the active slots as the host knows them. Plain Python; no tensor, no stream."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from trt_kvcache._util.checks import as_int, int_in_range, slot_index
from trt_kvcache.errors import CapacityError, LengthsUnknown, MappingError, RangeError, ShapeError

if TYPE_CHECKING:
    import numpy.typing as npt


class LengthMirror(NamedTuple):
    """The lengths of the active slots as the host knows them, and the checks of every change to them."""

    # Immutable: `after_...` checks a change and returns the mirror after it. The caller then launches the kernel, and takes the new mirror
    # last: if a check or the launch fails, the old mirror is still right.

    #: Slots, B.
    max_batch_size: int
    #: Tokens that a slot can hold, S.
    max_sequence_length: int
    #: For each active slot an upper bound of its length.
    upper_bounds: tuple[int, ...] = ()
    #: For each active slot True if the bound is its length. It is not after a change by values that only the device has.
    exact: tuple[bool, ...] = ()

    @property
    def active_batch_size(self) -> int:
        """Active slots, A."""
        return len(self.upper_bounds)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the active slots."""
        if not all(self.exact):
            self._raise_unknown([slot for slot, exact in enumerate(self.exact) if not exact])
        return self.upper_bounds

    @property
    def all_empty(self) -> bool:
        """True if every active slot is known to hold no token. True without active slots."""
        return not any(self.upper_bounds)

    def slot_index(self, slot: Any) -> int:
        """Return ``slot`` as an int, or raise :class:`~trt_kvcache.errors.SlotError` if it is not an active slot."""
        return slot_index(slot, len(self.upper_bounds), of="active slots")

    def length_of(self, slot: Any) -> int:
        """Return the length of one active slot, or raise :class:`~trt_kvcache.errors.LengthsUnknown` as :attr:`lengths` does."""
        index = self.slot_index(slot)
        if not self.exact[index]:
            self._raise_unknown([index])
        return self.upper_bounds[index]

    def is_exact(self, slot: Any) -> bool:
        """Return True if the host knows the length of an active slot, and False if it has an upper bound."""
        return self.exact[self.slot_index(slot)]

    def after_reset(self, lengths: Sequence[int]) -> LengthMirror:
        """Return the mirror after ``len(lengths)`` slots were made active with these lengths."""
        if len(lengths) > self.max_batch_size:
            raise RangeError(f"reuse_lengths: expected at most max_batch_size={self.max_batch_size} lengths, got {len(lengths)}.")
        if lengths and not 0 <= min(lengths) <= max(lengths) <= self.max_sequence_length:
            for slot, length in enumerate(lengths):
                int_in_range(f"reuse_lengths[{slot}]", length, 0, self.max_sequence_length)
        return self._with(tuple(lengths), (True,) * len(lengths))

    def after_commit(self, increments: Sequence[int], *, exact: bool = True) -> LengthMirror:
        """Return the mirror after tokens were added to the active slots: ``increments`` (A,), upper bounds unless ``exact``."""
        if len(increments) != len(self.upper_bounds):
            raise ShapeError(f"increment: expected one value for each of {len(self.upper_bounds)} active slots, got {len(increments)}.")
        if increments and min(increments) < 0:
            for slot, value in enumerate(increments):
                int_in_range(f"increment[{slot}]", value, 0)
        after = tuple(map(add, self.upper_bounds, increments))
        if after and max(after) > self.max_sequence_length:
            self._raise_full(increments, after)
        return self._with(after, self.exact if exact else (False,) * len(after))

    def after_resize(self, active_batch_size: Any) -> LengthMirror:
        """Return the mirror after the first slots were kept, or empty ones were added."""
        count = int_in_range("active batch size", active_batch_size, 0, self.max_batch_size)
        added = count - len(self.upper_bounds)
        return self._with(self.upper_bounds[:count] + (0,) * added, self.exact[:count] + (True,) * added)

    def after_clear(self, slot: Any) -> LengthMirror:
        """Return the mirror after an active slot was emptied."""
        return self._with_one(self.slot_index(slot), 0)

    def after_rewind(self, slot: Any, length: Any) -> LengthMirror:
        """Return the mirror after an active slot was shortened to ``length`` tokens."""
        index = self.slot_index(slot)
        held = self.upper_bounds[index]
        if not self.exact[index]:
            raise LengthsUnknown(f"rewind: only the device knows the length of slot {index}. Call sync_lengths(stream=) before.")
        wanted = as_int("length", length)
        if not 0 <= wanted <= held:
            raise RangeError(f"rewind: slot {index} holds {held} tokens; expected 0 to {held}, got {wanted}.")
        return self._with_one(index, wanted)

    def check_old_batch(self, old_batch: Any) -> int:
        """Return ``old_batch`` of a compaction as an int, or raise :class:`MappingError` if it is not the active batch size."""
        number = as_int("old_batch", old_batch)
        if number != len(self.upper_bounds):
            raise MappingError(f"compact_batch: expected old_batch={len(self.upper_bounds)}, the active batch size, got {number}.")
        return number

    def after_compaction(self, mapping: Sequence[int] | npt.NDArray[Any], new_batch: int) -> LengthMirror:
        """Return the mirror after the slots were moved by a valid mapping: its kept slots fill ``0..new_batch-1``."""
        # Old slots in the order of their new ones; dropped ones (-1) come first.
        sources = sorted(range(len(mapping)), key=mapping.__getitem__)[len(mapping) - new_batch :]
        return self._with(tuple(map(self.upper_bounds.__getitem__, sources)), tuple(map(self.exact.__getitem__, sources)))

    def after_device_compaction(self, new_batch: Any) -> LengthMirror:
        """Return the mirror after a compaction by a mapping that only the device knows, and that keeps the order of the slots."""
        count = int_in_range("new_batch", new_batch, 0, len(self.upper_bounds))
        # The slot that is now in `slot` was one of `slot` to `slot + dropped`, so the largest of their bounds holds for it.
        dropped = len(self.upper_bounds) - count
        bounds = tuple(max(self.upper_bounds[slot : slot + dropped + 1]) for slot in range(count))
        return self._with(bounds, (False,) * count)

    def after_sync(self, lengths: Sequence[int]) -> LengthMirror:
        """Return the mirror after the lengths were read from the device."""
        for slot, length in enumerate(lengths):
            if not 0 <= length <= self.max_sequence_length:
                raise LengthsUnknown(
                    f"slot {slot}: expected a length from 0 to {self.max_sequence_length} on the device, got {length}. "
                    "A committed tensor exceeded its max_increment; reset the slots."
                )
        return self._with(tuple(lengths), (True,) * len(lengths))

    def _with(self, upper_bounds: tuple[int, ...], exact: tuple[bool, ...]) -> LengthMirror:
        return LengthMirror(self.max_batch_size, self.max_sequence_length, upper_bounds, exact)

    def _with_one(self, slot: int, length: int) -> LengthMirror:
        return self._with(
            (*self.upper_bounds[:slot], length, *self.upper_bounds[slot + 1 :]), (*self.exact[:slot], True, *self.exact[slot + 1 :])
        )

    def _raise_unknown(self, slots: list[int]) -> None:
        raise LengthsUnknown(
            f"the lengths of slots {slots} were changed by values that only the device has. Call sync_lengths(stream=) to read them."
        )

    def _raise_full(self, increments: Sequence[int], after: tuple[int, ...]) -> None:
        slot = next(slot for slot, bound in enumerate(after) if bound > self.max_sequence_length)
        holds = "holds" if self.exact[slot] else "holds at most"
        hint = "" if self.exact[slot] else " Call sync_lengths(stream=) to learn its exact length."
        raise CapacityError(
            f"slot {slot} {holds} {self.upper_bounds[slot]} tokens; committing {increments[slot]} more exceeds "
            f"max_sequence_length={self.max_sequence_length}. Nothing was changed.{hint}"
        )
