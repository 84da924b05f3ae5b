"""``LengthMirror``: the bookkeeping of lengths on the host, without a device."""

import pytest

from trt_kvcache.cache.length_mirror import LengthMirror
from trt_kvcache.errors import CapacityError, LengthsUnknown, MappingError, RangeError, ShapeError, SlotError

B, S = 4, 10


def mirror(*lengths, unknown=()):
    """A mirror of these lengths, of which some are only upper bounds."""
    return LengthMirror(B, S, lengths, tuple(slot not in unknown for slot in range(len(lengths))))


class TestReading:
    def test_a_new_mirror_has_no_active_slot(self):
        new = LengthMirror(B, S)
        assert (new.active_batch_size, new.lengths, new.upper_bounds, new.all_empty) == (0, (), (), True)

    def test_exact_lengths_are_read(self):
        two = mirror(3, 0)
        assert (two.active_batch_size, two.lengths, two.length_of(0), two.is_exact(1)) == (2, (3, 0), 3, True)

    @pytest.mark.parametrize(("lengths", "empty"), [((0, 0), True), ((0, 1), False)])
    def test_all_empty(self, lengths, empty):
        assert mirror(*lengths).all_empty is empty

    def test_bounds_are_not_read_as_lengths(self):
        three = mirror(3, 5, 2, unknown=[0, 2])
        assert three.upper_bounds == (3, 5, 2)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0, 2\] were changed by values that only the device has\. Call"):
            _ = three.lengths

    def test_a_known_slot_is_read_beside_an_unknown_one(self):
        two = mirror(3, 5, unknown=[0])
        assert (two.length_of(1), two.is_exact(0), two.is_exact(1)) == (5, False, True)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0\] were"):
            two.length_of(0)

    @pytest.mark.parametrize("slot", [-1, 2, 3])
    @pytest.mark.parametrize("read", ["length_of", "is_exact", "slot_index", "after_clear"])
    def test_a_slot_that_is_not_active_is_refused(self, read, slot):
        with pytest.raises(SlotError, match=rf"^slot {slot}: expected 0 <= slot < 2 \(active slots\)"):
            getattr(mirror(3, 5), read)(slot)


class TestReset:
    @pytest.mark.parametrize("lengths", [[], [0], [0, S, 3], [1] * B])
    def test_lengths_are_known_whatever_was_before(self, lengths):
        after = mirror(9, 9, unknown=[0, 1]).after_reset(lengths)
        assert after == mirror(*lengths)

    def test_more_lengths_than_slots_are_refused(self):
        with pytest.raises(RangeError, match=r"^reuse_lengths: expected at most max_batch_size=4 lengths, got 5\.$"):
            mirror().after_reset([0] * 5)

    @pytest.mark.parametrize("length", [-1, S + 1])
    def test_a_length_out_of_range_is_refused(self, length):
        with pytest.raises(RangeError, match=rf"^reuse_lengths\[1\]: expected an integer from 0 to {S}, got {length}\.$"):
            mirror().after_reset([0, length])


class TestCommit:
    def test_each_slot_gets_its_own(self):
        before = mirror(3, 0, 5)
        assert before.after_commit([1, 0, 5]) == mirror(4, 0, 10)
        assert before == mirror(3, 0, 5)

    def test_bounds_stay_bounds(self):
        assert mirror(3, 0, unknown=[1]).after_commit([1, 2]) == mirror(4, 2, unknown=[1])

    def test_an_upper_bound_makes_every_length_one(self):
        assert mirror(3, 0).after_commit([2, 2], exact=False) == mirror(5, 2, unknown=[0, 1])

    def test_a_full_slot_is_named(self):
        with pytest.raises(CapacityError) as caught:
            mirror(3, 8, 9).after_commit([2, 3, 3])
        assert str(caught.value) == "slot 1 holds 8 tokens; committing 3 more exceeds max_sequence_length=10. Nothing was changed."

    def test_a_slot_that_may_be_full_is_named_with_a_hint(self):
        with pytest.raises(CapacityError) as caught:
            mirror(3, 8, unknown=[1]).after_commit([3, 3])
        assert str(caught.value) == (
            "slot 1 holds at most 8 tokens; committing 3 more exceeds max_sequence_length=10. Nothing was changed. "
            "Call sync_lengths(stream=) to learn its exact length."
        )

    def test_a_negative_increment_is_refused(self):
        with pytest.raises(RangeError, match=r"^increment\[1\]: expected at least 0, got -1\.$"):
            mirror(3, 5).after_commit([1, -1])

    @pytest.mark.parametrize("increments", [[], [1], [1, 1, 1]])
    def test_another_number_of_increments_is_refused(self, increments):
        with pytest.raises(ShapeError, match=rf"^increment: expected one value for each of 2 active slots, got {len(increments)}\.$"):
            mirror(3, 5).after_commit(increments)


class TestResize:
    def test_the_first_slots_are_kept(self):
        assert mirror(3, 5, 2, unknown=[0, 2]).after_resize(2) == mirror(3, 5, unknown=[0])

    def test_new_slots_are_known_to_be_empty(self):
        assert mirror(3, unknown=[0]).after_resize(3) == mirror(3, 0, 0, unknown=[0])

    @pytest.mark.parametrize("count", [-1, B + 1, 1.0, True])
    def test_another_number_of_slots_is_refused(self, count):
        with pytest.raises(RangeError, match=r"^active batch size: expected an integer"):
            mirror(3).after_resize(count)


class TestOneSlot:
    def test_a_cleared_slot_is_known_again(self):
        assert mirror(3, 5, 2, unknown=[0, 1]).after_clear(1) == mirror(3, 0, 2, unknown=[0])

    @pytest.mark.parametrize("length", [0, 4, 5])
    def test_rewind_shortens_one(self, length):
        assert mirror(3, 5, 2, unknown=[0]).after_rewind(1, length) == mirror(3, length, 2, unknown=[0])

    @pytest.mark.parametrize("length", [-1, 6])
    def test_rewind_does_not_lengthen(self, length):
        with pytest.raises(RangeError, match=rf"^rewind: slot 1 holds 5 tokens; expected 0 to 5, got {length}\.$"):
            mirror(3, 5).after_rewind(1, length)

    def test_rewind_of_an_unknown_length_is_refused(self):
        with pytest.raises(LengthsUnknown, match=r"^rewind: only the device knows the length of slot 1\. Call sync_lengths"):
            mirror(3, 5, unknown=[1]).after_rewind(1, 0)


class TestCompaction:
    def test_lengths_and_what_is_known_follow_their_slots(self):
        assert mirror(3, 5, 2, 7, unknown=[2, 3]).after_compaction([2, -1, 0, 1], 3) == mirror(2, 7, 3, unknown=[0, 1])

    @pytest.mark.parametrize(("old_batch", "error"), [(1, MappingError), (3, MappingError), (2.0, RangeError)])
    def test_the_old_batch_must_be_the_active_one(self, old_batch, error):
        with pytest.raises(error, match=r"^(compact_batch: expected old_batch=2, the active batch size, got|old_batch: expected an int)"):
            mirror(3, 5).check_old_batch(old_batch)

    def test_a_device_mapping_leaves_the_largest_bound_of_those_that_may_be_there(self):
        # Slot 0 holds what was in slot 0, 1 or 2; slot 1 what was in slot 1, 2 or 3.
        assert mirror(3, 5, 2, 7).after_device_compaction(2) == mirror(5, 7, unknown=[0, 1])

    def test_bounds_after_a_device_mapping_hold_for_every_mapping_that_keeps_the_order(self):
        before = mirror(3, 9, 0, 7)
        after = before.after_device_compaction(2).upper_bounds
        for first in range(4):
            for second in range(first + 1, 4):
                assert before.upper_bounds[first] <= after[0]
                assert before.upper_bounds[second] <= after[1]

    @pytest.mark.parametrize("new_batch", [-1, 3])
    def test_a_device_mapping_keeps_at_most_what_is_there(self, new_batch):
        with pytest.raises(RangeError, match=rf"^new_batch: expected an integer from 0 to 2, got {new_batch}\.$"):
            mirror(3, 5).after_device_compaction(new_batch)


class TestSync:
    def test_everything_is_known(self):
        assert mirror(9, 9, unknown=[0, 1]).after_sync([4, 0]) == mirror(4, 0)

    @pytest.mark.parametrize("length", [-1, S + 1])
    def test_a_length_that_cannot_be_is_refused(self, length):
        with pytest.raises(LengthsUnknown, match=rf"^slot 1: expected a length from 0 to 10 on the device, got {length}\. A committed"):
            mirror(9, 9, unknown=[0, 1]).after_sync([4, length])
