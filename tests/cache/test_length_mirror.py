"""``LengthMirror``: what the host knows of lengths, without a device. The same with one: test_lengths.py."""

import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from trt_kvcache.cache.length_mirror import LengthMirror
from trt_kvcache.errors import CapacityError, LengthsUnknown, MappingError, RangeError, ShapeError, SlotError

B, S = 4, 10
EMPTY = LengthMirror(max_batch_size=B, max_sequence_length=S)
THREE = EMPTY.after_reset([3, 0, 7])
#: Only the device knows all of them.
BOUNDS = THREE.after_commit([1, 2, 3], exact=False)


class TestReading:
    def test_without_active_slots(self):
        assert (EMPTY.active_batch_size, EMPTY.lengths, EMPTY.upper_bounds, EMPTY.all_empty) == (0, (), (), True)

    def test_lengths_that_are_known(self):
        assert (THREE.active_batch_size, THREE.lengths, THREE.upper_bounds) == (3, (3, 0, 7), (3, 0, 7))

    def test_lengths_that_are_not_known_are_not_told(self):
        with pytest.raises(LengthsUnknown) as caught:
            _ = BOUNDS.lengths
        assert str(caught.value) == (
            "the lengths of slots [0, 1, 2] were changed by values that only the device has. Call sync_lengths(stream=) to read them."
        )

    def test_the_length_of_one_slot(self):
        assert [THREE.length_of(slot) for slot in range(3)] == [3, 0, 7]

    def test_the_length_of_one_slot_that_is_not_known(self):
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[1\] were changed"):
            BOUNDS.length_of(1)

    def test_one_slot_may_be_known_beside_others(self):
        mirror = BOUNDS.after_clear(1)
        assert ([mirror.is_exact(slot) for slot in range(3)], mirror.length_of(1)) == ([False, True, False], 0)
        with pytest.raises(LengthsUnknown, match=r"^the lengths of slots \[0, 2\] were changed"):
            _ = mirror.lengths

    @pytest.mark.parametrize("read", [THREE.length_of, THREE.is_exact, THREE.slot_index])
    @pytest.mark.parametrize("slot", [3, -1])
    def test_slots_that_are_not_active(self, read, slot):
        with raises(SlotError, f"slot {slot}", expected="0 <= slot < 3 (active slots)"):
            read(slot)

    @pytest.mark.parametrize(("lengths", "empty"), [([], True), ([0, 0], True), ([0, 1], False)])
    def test_all_empty(self, lengths, empty):
        assert EMPTY.after_reset(lengths).all_empty is empty


class TestChanges:
    def test_a_mirror_is_not_changed_but_replaced(self):
        before = EMPTY.after_reset([3, 0, 7])
        before.after_commit([1, 1, 1])
        assert before.lengths == (3, 0, 7)

    def test_reset_makes_lengths_known_again(self):
        assert BOUNDS.after_reset([4]).lengths == (4,)

    def test_commit_adds(self):
        assert THREE.after_commit([1, 2, 3]).lengths == (4, 2, 10)

    def test_commit_of_bounds_moves_the_bounds(self):
        assert BOUNDS.upper_bounds == (4, 2, 10)

    def test_commit_of_known_numbers_keeps_what_is_known(self):
        mirror = BOUNDS.after_clear(1).after_commit([0, 5, 0])
        assert (mirror.upper_bounds, mirror.exact) == ((4, 5, 10), (False, True, False))

    def test_fewer_slots(self):
        assert THREE.after_resize(2).lengths == (3, 0)

    def test_more_slots_are_empty_and_known(self):
        mirror = BOUNDS.after_resize(4)
        assert (mirror.upper_bounds, mirror.exact) == ((4, 2, 10, 0), (False, False, False, True))

    def test_as_many_slots(self):
        assert THREE.after_resize(3) == THREE

    def test_clear(self):
        assert THREE.after_clear(2).lengths == (3, 0, 0)

    @pytest.mark.parametrize("length", [0, 4, 7])
    def test_rewind(self, length):
        assert THREE.after_rewind(2, length).lengths == (3, 0, length)

    def test_compaction_moves_lengths(self):
        assert THREE.after_compaction([1, -1, 0], 2).lengths == (7, 3)

    def test_compaction_moves_what_is_known(self):
        mirror = BOUNDS.after_clear(1).after_compaction([-1, 1, 0], 2)
        assert (mirror.upper_bounds, mirror.exact) == ((10, 0), (False, True))

    def test_a_mapping_on_the_device_leaves_the_largest_bound_that_a_slot_may_have_had(self):
        mirror = EMPTY.after_reset([3, 5, 0, 2]).after_device_compaction(3)
        assert (mirror.upper_bounds, mirror.exact) == ((5, 5, 2), (False,) * 3)

    def test_sync_makes_lengths_known_again(self):
        assert BOUNDS.after_sync([3, 1, 9]).lengths == (3, 1, 9)

    @given(st.lists(st.integers(0, S), max_size=B), st.data())
    def test_a_bound_holds_whatever_the_device_kept(self, lengths, data):
        """The device may drop any slots, as long as the others keep their order."""
        kept = [length for length in lengths if data.draw(st.booleans())]
        bounds = EMPTY.after_reset(lengths).after_device_compaction(len(kept)).upper_bounds
        assert all(length <= bound for length, bound in zip(kept, bounds, strict=True))


class TestRefused:
    @pytest.mark.parametrize(
        ("lengths", "text"),
        [
            ([1] * 5, "reuse_lengths: expected at most max_batch_size=4 lengths, got 5."),
            ([0, 11], "reuse_lengths[1]: expected an integer from 0 to 10, got 11."),
            ([-1], "reuse_lengths[0]: expected an integer from 0 to 10, got -1."),
        ],
    )
    def test_reset(self, lengths, text):
        with pytest.raises(RangeError) as caught:
            EMPTY.after_reset(lengths)
        assert str(caught.value) == text

    @pytest.mark.parametrize(
        ("increments", "error", "text"),
        [
            ([1, 1], ShapeError, "increment: expected one value for each of 3 active slots, got 2."),
            ([1, -1, 1], RangeError, "increment[1]: expected at least 0, got -1."),
            ([0, 0, 4], CapacityError, "slot 2 holds 7 tokens; committing 4 more exceeds max_sequence_length=10. Nothing was changed."),
        ],
    )
    def test_commit(self, increments, error, text):
        with pytest.raises(error) as caught:
            THREE.after_commit(increments)
        assert str(caught.value) == text

    def test_commit_past_a_bound_says_that_it_may_be_less(self):
        with pytest.raises(CapacityError) as caught:
            BOUNDS.after_commit([0, 0, 1])
        assert str(caught.value) == (
            "slot 2 holds at most 10 tokens; committing 1 more exceeds max_sequence_length=10. Nothing was changed. "
            "Call sync_lengths(stream=) to learn its exact length."
        )

    @pytest.mark.parametrize("count", [5, -1])
    def test_resize(self, count):
        with raises(RangeError, "active batch size", expected="0 to 4", got=count):
            THREE.after_resize(count)

    @pytest.mark.parametrize("length", [8, -1])
    def test_rewind_to_more_or_less_than_there_is(self, length):
        with raises(RangeError, "rewind: slot 2 holds 7 tokens", expected="0 to 7", got=length):
            THREE.after_rewind(2, length)

    def test_rewind_of_an_unknown_length(self):
        with pytest.raises(LengthsUnknown, match=r"^rewind: only the device knows the length of slot 2\. Call sync_lengths"):
            BOUNDS.after_rewind(2, 0)

    def test_another_batch_than_the_active_one(self):
        with raises(MappingError, "compact_batch", expected="old_batch=3", got=2):
            THREE.check_old_batch(2)

    @pytest.mark.parametrize("new_batch", [4, -1])
    def test_more_survivors_than_slots(self, new_batch):
        with raises(RangeError, "new_batch", expected="0 to 3", got=new_batch):
            THREE.after_device_compaction(new_batch)

    @pytest.mark.parametrize("length", [11, -1])
    def test_a_length_on_the_device_that_cannot_be(self, length):
        with raises(LengthsUnknown, "slot 1", expected="0 to 10 on the device", got=length):
            THREE.after_sync([0, length, 0])
