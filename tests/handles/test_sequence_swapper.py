"""Sequences on the host: which go, when they come back, and that nothing is lost on the way."""

from functools import partial

import numpy as np
import pytest

from tests.handles.sequences import LOST, STATES, TOKEN, handles, make_sequences, raw, slots_of, tokens
from tests.helpers.caches import LAYOUTS, B, FailingMemory, Image, S, Unchanged, fill_all
from tests.simt.standin import ALLOCATIONS, StandIn, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.errors import CapacityError, SequenceError

RECURRENT = pytest.mark.parametrize("kind", ["linear", "hybrid"])
PING_PONG = pytest.mark.parametrize("ping_pong", [False, True])


class TestRoundTrip:
    @LAYOUTS
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
    def test_tokens_come_back_bit_for_bit(self, make, memory, stream, layout, dtype):
        cache, sequences = make(swapping=True, layout=layout, dtype=dtype)
        fill_all(cache, stream)
        ids = sequences.new(*[1 + number % S for number in range(3 * B)])
        assert sequences.memory_swapped > 0
        streams = stream, memory.create_stream()
        for seq in np.random.default_rng(0).permutation(ids * 2).tolist():
            assert sequences.length(seq) == 1 + seq % S
            assert raw(sequences.get(seq, stream=streams[seq % 2])) == raw(tokens(cache, 1 + seq % S, seq))

    def test_empty_sequences_need_no_memory(self, make):
        _, sequences = make("hybrid", swapping=True)
        for seq in [sequences.create_sequence() for _ in range(B + 1)]:
            sequences.get(seq)
        assert (sequences.num_sequences, sequences.memory_swapped) == (B + 1, 0)

    def test_a_swapped_sequence_is_destroyed_where_it_is(self, make):
        _, sequences = make(swapping=True)
        ids = sequences.new(*[1] * (B + 1))
        assert sequences.memory_swapped == TOKEN["manager"]
        sequences.destroy_sequence(ids[0])
        assert sequences.memory_swapped == 0


class TestWhichOneGoes:
    """Four sequences of one token in slots 4 to 1, beside an active slot."""

    @pytest.fixture
    def sequences(self, make):
        cache, sequences = make(swapping=True)
        cache.reset_for_new_sequences([2])
        assert sequences.new(1, 1, 1, 1) == [0, 1, 2, 3]
        assert sequences.slots == [4, 3, 2, 1]
        return sequences

    def bring_in_another(self, sequences):
        sequences.get(sequences.create_sequence())

    def test_creating_a_sequence_moves_none(self, sequences):
        sequences.create_sequence()
        assert sequences.slots == [4, 3, 2, 1, None]

    def test_the_least_recently_used_one(self, sequences):
        self.bring_in_another(sequences)
        assert sequences.slots == [None, 3, 2, 1, 4]

    @pytest.mark.parametrize("use", ["get", "truncate", "append"])
    def test_none_that_was_just_used(self, sequences, use):
        arguments = {"get": (), "truncate": (1,), "append": tokens(sequences.cache, 1, 9)}[use]
        getattr(sequences, use)(0, *arguments)
        self.bring_in_another(sequences)
        assert sequences.slots == [4, None, 2, 1, 3]

    def test_none_whose_length_was_asked_for_only(self, sequences):
        sequences.length(0)
        self.bring_in_another(sequences)
        assert sequences.slots[0] is None

    def test_none_that_is_pinned(self, sequences):
        assert sequences.pin(0) == 4
        assert sequences.pin(1) == 3
        self.bring_in_another(sequences)
        assert sequences.slots == [4, 3, None, 1, 2]

    def test_one_that_is_not_pinned_any_more(self, sequences):
        sequences.pin(0)
        for seq in (1, 2, 3):
            sequences.get(seq)
        sequences.unpin(0)
        sequences.get(0)  # it was used when it was pinned, and now
        sequences.pin(1)
        sequences.unpin(1)
        self.bring_in_another(sequences)
        assert sequences.slots == [4, 3, None, 1, 2]

    def test_a_swapped_one_takes_the_slot_of_another(self, sequences):
        self.bring_in_another(sequences)
        sequences.check(0, 1)
        assert sequences.slots == [3, None, 2, 1, 4]

    def test_none_goes_where_all_are_pinned(self, sequences):
        for seq in range(4):
            sequences.pin(seq)
        text = "create_sequence: expected 1 free slots, got 0 of 5. All are active or pinned."
        sequences.refuses(CapacityError, text, sequences.create_sequence)

    def test_a_swapped_one_waits_where_all_others_are_pinned(self, sequences):
        self.bring_in_another(sequences)
        for seq in (1, 2, 3, 4):
            sequences.pin(seq)
        text = "sequence 0 has no slot, and all slots are active or pinned. Nothing was changed."
        sequences.refuses(CapacityError, text, sequences.get, 0)

    def test_a_destroyed_one_leaves_its_slot(self, sequences):
        self.bring_in_another(sequences)
        sequences.destroy_sequence(2)
        sequences.check(0, 1)
        assert slots_of(sequences) == {0: 2, 1: 3, 3: 1, 4: 4}


class TestThreshold:
    """Slots hold 35 tokens in all."""

    def test_below_it_nothing_goes(self, make):
        _, sequences = make(swapping=True, threshold=0.5)
        sequences.new(7, 7, 3)
        assert sequences.memory_swapped == 0

    def test_above_it_the_least_recently_used_one_goes(self, make):
        _, sequences = make(swapping=True, threshold=0.5)
        sequences.new(7, 7, 4)
        assert sequences.slots == [None, 3, 2]

    def test_no_more_go_than_need_be(self, make):
        _, sequences = make(swapping=True, threshold=0.16)  # 5.6 tokens
        sequences.new(*[1] * 6)
        assert sequences.memory_swapped == TOKEN["manager"]

    def test_several_go_where_one_is_not_enough(self, make):
        _, sequences = make(swapping=True, threshold=0.3)  # 10.5 tokens
        sequences.new(2, 2, 5, 6)
        assert sequences.slots == [None, None, None, 1]

    def test_none_goes_that_has_no_tokens(self, make):
        _, sequences = make(swapping=True, threshold=0.16)
        sequences.new(0, 3, 3)
        assert sequences.slots == [4, None, 2], "without tokens nothing is gained"

    def test_active_slots_count(self, make):
        cache, sequences = make(swapping=True, threshold=0.5)
        sequences.new(7)
        cache.reset_for_new_sequences([6])
        sequences.new(5)
        assert sequences.slots == [None, 3]

    def test_coming_back_may_send_another_out(self, make):
        _, sequences = make(swapping=True, threshold=0.5)
        a, _, _ = sequences.new(4, 7, 7)
        sequences.check(a, 4)
        assert sequences.memory_swapped == 7 * TOKEN["manager"]

    def test_without_swapping_it_means_nothing(self, make):
        _, sequences = make(threshold=0.01)
        sequences.new(7, 7)
        assert (sequences.slots, sequences.memory_swapped) == ([4, 3], 0)


class TestIntoAGivenSlot:
    """Slots 0 and 1 are active, of which 1 holds two tokens; three sequences of one, two and three tokens are in slots 4, 3 and 2."""

    @pytest.fixture(params=[False, True], ids=["without swapping", "with swapping"])
    def both(self, request, make):
        cache, sequences = make(swapping=request.param)
        cache.reset_for_new_sequences([0, 2])
        sequences.new(1, 2, 3)
        yield cache, sequences
        for seq in range(3):
            sequences.check(seq, seq + 1)

    def refused(self, sequences, seq, slot, text):
        sequences.refuses(CapacityError, f"{text} Nothing was changed.", sequences.pin, seq, slot=slot)

    def test_where_it_is(self, both):
        _, sequences = both
        assert (sequences.pin(0, slot=4), sequences.slots) == (4, [4, 3, 2])

    def test_two_change_places(self, both):
        _, sequences = both
        assert (sequences.pin(0, slot=2), sequences.slots) == (2, [2, 3, 4])

    def test_an_active_and_empty_slot_gets_its_tokens(self, both):
        cache, sequences = both
        assert (sequences.pin(0, slot=0), sequences.slots) == (0, [0, 3, 2])
        assert cache.host_kv_cache_lengths == tuple(cache.kv_cache_lengths.numpy().tolist()) == (1, 2)

    def test_a_pinned_one_is_not_driven_out(self, both):
        _, sequences = both
        sequences.pin(0, slot=2)
        self.refused(sequences, 1, 2, "slot 2 holds sequence 0, which is active or pinned.")

    def test_one_in_an_active_slot_is_not_driven_out(self, both):
        _, sequences = both
        sequences.pin(0, slot=0)
        self.refused(sequences, 1, 0, "slot 0 holds sequence 0, which is active or pinned.")

    def test_an_active_slot_with_tokens_is_somebody_elses(self, both):
        _, sequences = both
        self.refused(sequences, 1, 1, "slot 1 is active and not empty. Clear it before.")

    def test_an_active_slot_that_it_leaves_is_its_runners(self, both):
        cache, sequences = both
        sequences.pin(0, slot=0)
        assert sequences.pin(0, slot=4) == 4
        assert cache.host_kv_cache_lengths == (1, 2)

    def test_the_one_that_must_make_way_goes_to_a_free_slot(self, both):
        _, sequences = both
        sequences.pin(0, slot=0)  # which leaves slot 4
        assert (sequences.pin(0, slot=3), sequences.slots) == (3, [3, 4, 2])

    def test_the_one_that_must_make_way_goes_to_the_host(self, make):
        cache, sequences = make(swapping=True)
        cache.reset_for_new_sequences([0, 2])
        sequences.new(1, 2, 3)
        sequences.pin(0, slot=0)
        sequences.create_sequence()  # in slot 4
        assert (sequences.pin(0, slot=3), sequences.slots) == (3, [3, None, 2, 4])
        assert sequences.memory_swapped == 2 * TOKEN["manager"]

    def test_without_swapping_the_one_that_must_make_way_has_nowhere_to_go(self, make):
        cache, sequences = make()
        cache.reset_for_new_sequences([0, 2])
        sequences.new(1, 2, 3)
        sequences.pin(0, slot=0)
        sequences.create_sequence()  # in slot 4
        self.refused(sequences, 0, 3, "sequence 1 must leave slot 3, and no other is free.")


class TestOutOfAnActiveSlot:
    def test_unpin_moves_it_to_a_free_slot(self, make):
        cache, sequences = make()
        cache.reset_for_new_sequences([0])
        (seq,) = sequences.new(3)
        sequences.pin(seq, slot=0)
        sequences.unpin(seq)
        assert sequences.slots == [4]
        sequences.check(seq, 3)

    def test_the_active_slot_keeps_what_it_holds(self, make):
        cache, sequences = make()
        cache.reset_for_new_sequences([0])
        (seq,) = sequences.new(3)
        sequences.pin(seq, slot=0)
        held = Image(cache)
        sequences.unpin(seq)
        assert cache.host_kv_cache_lengths == (3,)
        for before, after in zip(held.rows, Image(cache).rows, strict=True):
            assert np.array_equal(before[0], after[0])

    def test_unpin_where_no_slot_is_free(self, make):
        cache, sequences = make()
        seq = sequences.create_sequence()
        cache.set_active_batch_size(B)
        text = "and no other slot is free. Shrink the active batch, or enable swapping. Nothing was changed."
        text = f"sequence {seq} is in active slot 4, {text}"
        sequences.refuses(CapacityError, text, sequences.unpin, seq)

    def test_unpin_where_no_slot_is_free_but_the_host(self, make):
        cache, sequences = make(swapping=True)
        seq = sequences.create_sequence()
        cache.set_active_batch_size(B)
        cache.commit_sequence_length([0, 0, 0, 0, 2])
        sequences.unpin(seq)
        assert (sequences.slots, sequences.memory_swapped) == ([None], 2 * TOKEN["manager"])

    def test_unpin_of_one_that_waits_moves_nothing(self, make):
        cache, sequences = make()
        (seq,) = sequences.new(3)
        sequences.pin(seq)
        with Unchanged(cache):
            sequences.unpin(seq)
        assert sequences.slots == [4]


@RECURRENT
@PING_PONG
class TestStates:
    """A sequence that an engine has run carries its states along."""

    @pytest.fixture
    def run(self, make, stream, kind, ping_pong):
        """A sequence that an engine has run for five tokens in active slot 1, with an image of the cache as it was then."""
        cache, sequences = make(kind, swapping=True, ping_pong=ping_pong)
        seq = sequences.create_sequence()
        cache.set_active_batch_size(2)
        sequences.pin(seq, slot=1)
        fill_all(cache, stream, 1)  # what an engine does
        cache.commit_sequence_length([0, 5])
        return cache, sequences, seq, Image(cache)

    def test_a_new_sequence_starts_from_zero(self, make, stream, kind, ping_pong):
        cache, sequences = make(kind, swapping=True, ping_pong=ping_pong)
        fill_all(cache, stream)
        expected = Image(cache)
        assert sequences.pin(sequences.create_sequence()) == 4
        expected.zero_states(4)
        expected.check(cache)

    def test_its_bytes_count(self, run, kind, ping_pong):
        _, sequences, seq, _ = run
        assert (sequences.length(seq), sequences.memory_used) == (5, 5 * TOKEN[kind] + (1 + ping_pong) * STATES)

    def test_out_of_its_slot_it_has_them_in_both_buffers(self, run):
        """Those of others may be swapped while it waits."""
        cache, sequences, seq, held = run
        expected = Image(cache)
        sequences.unpin(seq)
        expected.move(4, held, 1, 5)
        for into, states in zip(expected.next_states, held.states, strict=True):
            into[4] = states[1]
        expected.check(cache)

    def test_on_the_host_it_has_them_once(self, run, kind):
        cache, sequences, seq, _ = run
        sequences.unpin(seq)
        cache.clear_slot(1)
        cache.swap()
        for _ in range(3):
            sequences.pin(sequences.create_sequence())
        assert sequences.memory_swapped == 5 * TOKEN[kind] + STATES

    def test_it_comes_back_into_the_current_ones_of_an_active_slot(self, run, stream):
        cache, sequences, seq, held = run
        sequences.unpin(seq)
        cache.clear_slot(1)
        cache.swap()
        for _ in range(3):
            sequences.pin(sequences.create_sequence())
        fill_all(cache, stream, 2)
        expected = Image(cache)
        assert sequences.pin(seq, slot=0) == 0
        expected.move(0, held, 1, 5)
        expected.check(cache)
        assert (cache.host_kv_cache_lengths, sequences.memory_swapped) == ((5, 0), 0)

    def test_its_rows_are_got_wherever_it_is(self, run):
        _, sequences, seq, held = run
        sequences.unpin(seq)
        for which, arrays in enumerate(sequences.get(seq)):
            for rows, array in zip(held.rows, arrays, strict=True):
                assert np.array_equal(array.view(np.uint8), rows[1, which, :, :5])


@RECURRENT
@pytest.mark.parametrize("leave", [("set_active_batch_size", 1), ("compact_batch", [0, -1], 2, 1), ("reset_for_new_sequences", [0])])
def test_states_of_a_slot_that_leaves_the_batch_are_not_swapped_away(make, stream, kind, leave):
    cache, sequences = make(kind, ping_pong=True)
    seq = sequences.create_sequence()
    cache.set_active_batch_size(2)
    sequences.pin(seq, slot=1)
    cache.commit_sequence_length(3)
    fill_all(cache, stream)
    held = Image(cache)
    getattr(cache, leave[0])(*leave[1:])
    cache.swap()
    sequences.unpin(seq)
    cache.clear_slot(0)
    assert sequences.pin(seq, slot=0) == 0
    for array, states in zip(Image(cache).states, held.states, strict=True):
        assert np.array_equal(array[0], states[1])


class LateMemory(HostMemory):
    """As late as a device may be: what is copied from or to the host is copied when the host waits."""

    def __init__(self):
        super().__init__()
        self.late = []

    def upload(self, destination, source, *, stream):
        self.late.append(partial(super().upload, destination, source, stream=stream))

    def download(self, destination, source, *, stream):
        self.late.append(partial(super().download, destination, source, stream=stream))

    def synchronize(self, stream):
        while self.late:
            self.late.pop(0)()


class TestWaits:
    @pytest.fixture
    def late(self):
        memory = LateMemory()
        return memory, *make_sequences(memory, memory.create_stream(), swapping=True)

    def test_appended_arrays_may_be_changed(self, late):
        _, cache, sequences = late
        seq, new = sequences.create_sequence(), tokens(cache, 2, 0)
        sequences.append(seq, *new)
        for array in (*new[0], *new[1]):
            array[...] = 0
        sequences.check(seq, 2)

    def test_a_copy_on_the_host_is_complete_before_its_slot_is_used(self, late):
        memory, _, sequences = late
        (seq,) = sequences.new(2)
        for _ in range(B):
            sequences.pin(sequences.create_sequence())
            assert not memory.late
        assert sequences.slots[seq] is None
        sequences.unpin(seq + 1)
        sequences.check(seq, 2)

    def test_a_sequence_is_in_its_slot_when_pin_returns(self, late):
        memory, _, sequences = late
        (seq,) = sequences.new(2)
        for _ in range(B):
            sequences.get(sequences.create_sequence())
        sequences.pin(seq)
        assert not memory.late


def add_past_the_threshold(sequences):
    sequences.add(0, 3)


def drive_another_out(sequences):
    sequences.pin(2, slot=3)


def run_and_put_away(sequences):
    sequences.pin(2, slot=0)
    sequences.unpin(2)


#: What sends sequences to the host, and how many host copies that takes.
SWAPS = [(add_past_the_threshold, 1), (drive_another_out, 2), (run_and_put_away, 1)]


def three_sequences(memory, stream):
    """Three sequences of four tokens, just below the threshold, beside an active and empty slot."""
    cache, sequences = make_sequences(memory, stream, swapping=True, threshold=12 / 35)
    cache.reset_for_new_sequences([0])
    sequences.new(4, 4, 4)
    assert sequences.memory_swapped == 0
    return cache, sequences


class TestNoRoom:
    @pytest.mark.parametrize(("call", "left"), [(call, left) for call, copies in SWAPS for left in range(copies)])
    def test_on_the_host_changes_nothing(self, call, left):
        memory = FailingMemory()
        _, sequences = three_sequences(memory, memory.create_stream())
        memory.left, memory.failures = left, 1
        sequences.refuses(CapacityError, "no room.", call, sequences)

    @pytest.mark.parametrize("call", [call for call, _ in SWAPS])
    def test_the_call_succeeds_when_there_is_room_again(self, call):
        memory = FailingMemory()
        _, sequences = three_sequences(memory, memory.create_stream())
        memory.failures = 1
        with pytest.raises(CapacityError):
            call(sequences)
        call(sequences)
        for seq in (1, 2):
            sequences.check(seq, 4)

    @needs_standin
    def test_of_page_locked_memory(self, memory, stream):
        cache, sequences = three_sequences(memory, stream)
        before = handles(sequences)
        StandIn().fail_allocation(1)
        with Unchanged(cache), pytest.raises(CapacityError, match="page-locked host memory"):
            add_past_the_threshold(sequences)
        assert handles(sequences) == before


@needs_standin
class TestPageLockedMemory:
    def test_it_is_all_that_swapping_allocates(self, memory, stream):
        _, sequences = three_sequences(memory, stream)
        standin = StandIn()
        add_past_the_threshold(sequences)
        assert [call for call in standin.take_calls() if call in ALLOCATIONS] == ["cuMemAllocHost_v2"]
        assert standin.page_locked_nbytes == sequences.memory_swapped == 4 * TOKEN["manager"]

    def test_it_goes_with_the_sequences(self, memory, stream):
        _, sequences = three_sequences(memory, stream)
        standin = StandIn()
        add_past_the_threshold(sequences)
        sequences.destroy_all_sequences()
        assert (standin.page_locked_nbytes, standin.device_nbytes) == (0, 0)


def test_a_lost_sequence_is_not_brought_back(make):
    cache, sequences = make(swapping=True)
    (seq,) = sequences.new(2)
    cache.reset_for_new_sequences([0, 1])
    sequences.pin(seq, slot=0)
    cache.compact_batch([-1, 0], 2, 1)
    sequences.refuses(SequenceError, f"sequence {seq}: {LOST}", sequences.get, seq)
