"""Which sequence is in which slot, whatever the owner of the cache does with its slots."""

import pytest

from tests.handles.sequences import LOST, TOKEN, make_sequences, slots_of
from tests.helpers.caches import SEQUENCE_KINDS, B, FailingMemory, Image, S, fill_all, on_device
from trt_kvcache.errors import CapacityError, LengthsUnknown, SequenceError

UNPIN = "Reset the slot to the length of the sequence, or unpin it before. Nothing was changed."
WAITS = (
    "slot {} would become active, but sequence {} waits there, and no other slot is free. "
    "Pin it there and reset the slot to its length, destroy it, or enable swapping. Nothing was changed."
)

#: How the last token of a sequence is committed: so that the host knows it, or only the device.
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known to the host", "known to the device"])

SWAPPING = pytest.mark.parametrize("swapping", [False, True], ids=["without swapping", "with swapping"])

#: What is done to a sequence whose slot, the last one, is active and holds five tokens; how many it has afterwards if it is not
#: pinned, and if it is. None if the last call is refused, because they would be lost: there is no other slot.
LEAVE, ENTER, RUN = ("set_active_batch_size", 0), ("set_active_batch_size", B), ("commit_sequence_length", 1)
RESET, COMPACT, CLEAR = "reset_for_new_sequences", "compact_batch", ("clear_slot", B - 1)
FATES = {
    "its slot leaves the batch": ([LEAVE], 5, 5),
    "it runs and its slot leaves the batch": ([RUN, LEAVE], 6, 6),
    "its slot leaves and enters empty": ([LEAVE, ENTER], None, None),
    "its slot leaves and is reset to nothing": ([LEAVE, (RESET, [0] * B)], None, None),
    "its slot leaves and is reset to fewer tokens": ([LEAVE, (RESET, [0, 0, 0, 0, 4])], None, 4),
    "its slot leaves and is reset to more tokens": ([LEAVE, (RESET, [0, 0, 0, 0, 6])], None, 6),
    "its active slot is reset to nothing": ([(RESET, [0] * B)], 0, 0),
    "a reset without its slot, which then enters": ([(RESET, [1, 1]), ENTER], None, None),
    "its slot is cleared, leaves, enters and runs": ([CLEAR, LEAVE, ENTER, RUN], 1, 1),
    "its slot is cleared, leaves and is reset to some tokens": ([CLEAR, LEAVE, (RESET, [0, 0, 0, 0, 2])], None, 2),
    "a compaction drops its slot": ([(COMPACT, [0, 1, 2, 3, -1], 5, 4)], 5, 5),
    "a compaction drops its slot, which then enters": ([(COMPACT, [0, 1, 2, 3, -1], 5, 4), ENTER], None, None),
    "a compaction drops its slot, which is then reset to as many": (
        [(COMPACT, [-1, -1, -1, 0, -1], 5, 1), (RESET, [0, 0, 0, 0, 5])],
        None,
        5,
    ),
    "a compaction moves its slot, which then leaves": ([(COMPACT, [0, 4, 2, 3, 1], 5, 5), ("set_active_batch_size", 1)], 5, 5),
}


@KNOWN
@pytest.mark.parametrize("pin", [False, True], ids=["not pinned", "pinned"])
@pytest.mark.parametrize(("calls", "unpinned", "pinned"), FATES.values(), ids=FATES)
def test_what_becomes_of_a_sequence(make, memory, stream, known, pin, calls, unpinned, pinned):
    """Its tokens are never other ones, nor lost without an error, nor counted wrongly before anybody asks how many there are."""
    cache, sequences = make()
    seq = sequences.create_sequence()
    if pin:
        sequences.pin(seq)
    cache.set_active_batch_size(B)
    cache.commit_sequence_length([0, 0, 0, 0, 4])
    if known:
        cache.commit_sequence_length([0, 0, 0, 0, 1])
    else:
        cache.commit_sequence_length(on_device(memory, [0, 0, 0, 0, 1], stream), max_increment=1)
    expected = pinned if pin else unpinned
    *calls, last = calls
    for name, *arguments in calls:
        getattr(cache, name)(*arguments)
    if expected is None:
        expected = sequences.length(seq)  # so that what is known of it stays the same
        text = (
            f"slot 4 would become active and empty, but sequence {seq} is pinned there with tokens. {UNPIN}"
            if pin
            else WAITS.format(4, seq)
        )
        sequences.refuses(CapacityError, text, getattr(cache, last[0]), *last[1:])
    else:
        getattr(cache, last[0])(*last[1:])
    others = [bound for slot, bound in enumerate(cache.lengths.upper_bounds) if slot != sequences.slots[seq]]
    assert sequences.memory_used == (sum(others) + expected) * TOKEN["manager"]
    assert sequences.length(seq) == expected


def contents(cache, slot, length):
    """The bytes of the first tokens of a slot, and of its states."""
    image = Image(cache)
    return [rows[slot, :, :, :length].tobytes() for rows in image.rows], [states[slot].tobytes() for states in image.states]


class TestActiveSlot:
    """A sequence in an active slot has the length that the cache says."""

    @pytest.fixture
    def both(self, make):
        """Two sequences: a pinned one of four tokens in slot 4, an empty one in slot 3. All slots are active."""
        cache, sequences = make()
        seqs = [sequences.create_sequence() for _ in range(2)]
        sequences.add(seqs[0], 4)
        sequences.pin(seqs[0])
        cache.reset_for_new_sequences([1, 1, 1, 0, 4])
        return cache, sequences

    def test_lengths_are_those_of_the_cache(self, both):
        cache, sequences = both
        cache.commit_sequence_length([0, 0, 0, 2, 1])
        assert [sequences.length(seq) for seq in range(2)] == [5, 2]

    def test_append_commits(self, both):
        cache, sequences = both
        sequences.add(1, 2)
        assert cache.host_kv_cache_lengths == tuple(cache.kv_cache_lengths.numpy().tolist()) == (1, 1, 1, 2, 4)

    def test_truncate_rewinds(self, both):
        cache, sequences = both
        sequences.truncate(0, 3)
        assert cache.host_kv_cache_lengths == tuple(cache.kv_cache_lengths.numpy().tolist()) == (1, 1, 1, 0, 3)

    def test_tokens_are_got_from_it(self, both):
        _, sequences = both
        sequences.check(0, 4)

    def test_pin_stays_where_it_is(self, both):
        _, sequences = both
        assert [sequences.pin(0), sequences.pin(0, slot=4), sequences.pin(1)] == [4, 4, 3]

    def test_a_length_that_only_the_device_knows_is_not_told(self, both, memory, stream):
        cache, sequences = both
        cache.commit_sequence_length(on_device(memory, [1] * B, stream), max_increment=1)
        text = "the lengths of slots [4] were changed by values that only the device has. Call sync_lengths(stream=) to read them."
        for call in (sequences.length, sequences.unpin, sequences.get):
            sequences.refuses(LengthsUnknown, text, call, 0)

    def test_a_length_that_only_the_device_knew_is_read_once_the_slot_has_left(self, both, memory, stream):
        cache, sequences = both
        cache.commit_sequence_length(on_device(memory, [1] * B, stream), max_increment=1)
        cache.set_active_batch_size(2)
        assert [sequences.length(seq) for seq in range(2)] == [5, 1]

    def test_one_slot_may_be_known_beside_another(self, both, memory, stream):
        cache, sequences = both
        cache.commit_sequence_length(on_device(memory, [1] * B, stream), max_increment=1)
        cache.clear_slot(3)
        assert sequences.length(1) == 0

    def test_bytes_are_bounds_until_the_length_is_read(self, both, memory, stream):
        cache, sequences = both
        cache.commit_sequence_length(on_device(memory, [0, 0, 0, 0, 1], stream), max_increment=2)
        cache.set_active_batch_size(0)
        assert sequences.memory_used == (6 + 2) * TOKEN["manager"]
        for seq in range(2):
            sequences.length(seq)
        assert sequences.memory_used == 5 * TOKEN["manager"]

    def test_whoever_runs_a_pinned_sequence_may_shorten_it(self, both):
        cache, sequences = both
        cache.reset_for_new_sequences([0, 0, 0, 0, 3])
        assert sequences.length(0) == 3


class TestUnasked:
    """Tokens are committed while a sequence is in an active slot, and nobody asks for its length before the slot leaves."""

    @pytest.fixture
    def both(self, make, stream):
        cache, sequences = make(swapping=True)
        seq = sequences.create_sequence()
        fill_all(cache, stream)
        cache.set_active_batch_size(B)
        cache.commit_sequence_length(3)
        cache.set_active_batch_size(0)
        return cache, sequences, seq

    def test_they_are_counted(self, both):
        _, sequences, seq = both
        assert sequences.length(seq) == 3

    def test_they_are_counted_where_it_runs_again(self, both):
        cache, sequences, seq = both
        sequences.pin(seq)
        cache.reset_for_new_sequences([0, 0, 0, 0, 3])
        cache.commit_sequence_length(1)
        cache.set_active_batch_size(0)
        assert sequences.length(seq) == 4

    def test_they_are_counted_where_a_compaction_drops_its_slot(self, both):
        cache, sequences, seq = both
        sequences.pin(seq)
        cache.reset_for_new_sequences([0, 0, 0, 0, 3])
        cache.commit_sequence_length(1)
        cache.compact_batch([-1, 0, 1, -1, -1], 5, 2)
        assert sequences.length(seq) == 4

    def test_they_are_swapped_with_it(self, both):
        cache, sequences, seq = both
        held = [rows[4, which, :, :3].tobytes() for rows in Image(cache).rows for which in (0, 1)]
        for _ in range(B):
            sequences.get(sequences.create_sequence())
        assert sequences.memory_swapped == 3 * TOKEN["manager"]
        assert [layer.tobytes() for pair in zip(*sequences.get(seq), strict=True) for layer in pair] == held


class TestCompaction:
    """Sequences of one to four tokens in the active slots 0 to 3; slot 4 is active and empty."""

    @pytest.fixture
    def both(self, make):
        cache, sequences = make()
        for slot in range(B - 1):
            cache.set_active_batch_size(slot + 1)
            sequences.pin(sequences.create_sequence(), slot=slot)
            sequences.add(slot, slot + 1)
        cache.set_active_batch_size(B)
        return cache, sequences

    def test_sequences_follow_their_slots(self, both):
        cache, sequences = both
        cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
        assert (slots_of(sequences)[0], slots_of(sequences)[2]) == (1, 0)
        for seq in (0, 2):
            sequences.check(seq, seq + 1)

    def test_one_whose_slot_was_overwritten_is_lost(self, both):
        cache, sequences = both
        cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
        sequences.refuses(SequenceError, f"sequence 1: {LOST}", sequences.length, 1)

    def test_one_that_was_dropped_but_not_overwritten_is_not(self, both):
        cache, sequences = both
        cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
        sequences.check(3, 4)

    def test_a_lost_one_can_be_destroyed_once(self, both):
        cache, sequences = both
        cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
        sequences.destroy_sequence(1)
        sequences.refuses(SequenceError, "sequence 1: it was destroyed.", sequences.destroy_sequence, 1)

    def test_a_lost_one_is_not_counted(self, both):
        cache, sequences = both
        cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
        assert sequences.num_sequences == 3

    def test_a_mapping_on_the_device_that_drops_none_keeps_all(self, both, memory, stream):
        cache, sequences = both
        cache.compact_batch(on_device(memory, range(5), stream), 5, 5)
        cache.sync_lengths()
        assert [sequences.length(seq) for seq in range(4)] == [1, 2, 3, 4]

    def test_a_mapping_on_the_device_that_drops_some_loses_all(self, both, memory, stream):
        cache, sequences = both
        cache.compact_batch(on_device(memory, [0, -1, 1, 2, 3], stream), 5, 4)
        for seq in range(4):
            sequences.refuses(SequenceError, f"sequence {seq}: {LOST}", sequences.get, seq)

    def test_a_mapping_on_the_device_leaves_those_that_wait(self, both, memory, stream):
        cache, sequences = both
        cache.compact_batch([0, 1, 2, -1, -1], 5, 3)
        cache.compact_batch(on_device(memory, [0, -1, 1], stream), 3, 2)
        sequences.check(3, 4)


class TestEnteringSlot:
    """Sequences wait in slots that become active: nobody has asked for them, and none is lost."""

    @SWAPPING
    def test_the_recipe_of_the_documentation_keeps_a_sequence_that_waits_in_slot_0(self, make, swapping):
        cache, sequences = make(swapping=swapping)
        seqs = sequences.new(*range(1, B + 1))  # every slot is taken; the last one waits in slot 0
        sequences.destroy_sequence(seqs[0])
        cache.set_active_batch_size(1)
        assert sequences.pin(seqs[1], slot=0) == 0
        assert cache.host_kv_cache_lengths == (2,)
        for seq in seqs[1:]:
            sequences.check(seq, seq + 1)

    @SWAPPING
    def test_the_sequence_that_waits_there_can_be_the_one_to_run(self, make, swapping):
        cache, sequences = make(swapping=swapping)
        seqs = sequences.new(1, 2, 3, 4, 5)
        sequences.destroy_sequence(seqs[0])
        cache.set_active_batch_size(1)
        sequences.pin(seqs[-1], slot=0)
        assert cache.host_kv_cache_lengths == (5,)
        for seq in seqs[1:]:
            sequences.check(seq, seq + 1)

    @pytest.mark.parametrize("kind", SEQUENCE_KINDS)
    def test_rows_and_states_come_back_bit_for_bit(self, memory, stream, kind):
        cache, sequences = make_sequences(memory, stream, kind, swapping=True)
        seqs = [sequences.create_sequence() for _ in range(B)]
        cache.set_active_batch_size(B)
        fill_all(cache, stream)
        cache.commit_sequence_length([1, 2, 3, 4, 5])
        cache.set_active_batch_size(0)
        held = {seq: contents(cache, slots_of(sequences)[seq], sequences.length(seq)) for seq in seqs}
        cache.set_active_batch_size(B)  # all of them go to the host
        assert set(slots_of(sequences).values()) == {None}
        fill_all(cache, stream, seed=1)
        cache.set_active_batch_size(0)
        for seq in seqs:
            assert contents(cache, sequences.pin(seq), sequences.length(seq)) == held[seq]
            sequences.unpin(seq)

    @SWAPPING
    @pytest.mark.parametrize("length", [1, 3, 4])
    def test_what_runs_in_its_slot_does_not_reach_it(self, make, swapping, length):
        cache, sequences = make(swapping=swapping)
        first, last = sequences.new(1, 1, 1, 1, 3)[:: B - 1]  # the last one waits in slot 0
        if not swapping:
            sequences.destroy_sequence(first)
        cache.reset_for_new_sequences([length])
        cache.restore_kv_cache(cache.capture_kv_cache(1, S), 0)
        cache.commit_sequence_length([2])
        assert cache.host_kv_cache_lengths == (length + 2,)
        sequences.check(last, 3)

    def test_the_most_recently_used_ones_stay_in_the_cache(self, make):
        cache, sequences = make(swapping=True)
        seqs = sequences.new(1, 1, 1, 1, 1)
        sequences.destroy_sequence(seqs[0])  # slot 4 is free
        cache.set_active_batch_size(3)  # sequences 4, 3 and 2 wait there
        assert slots_of(sequences) == {1: 3, 2: None, 3: None, 4: 4}

    def test_without_another_slot_the_active_batch_stays_as_it_is(self, make):
        cache, sequences = make()
        sequences.new(1, 2, 3, 4, 5)
        sequences.refuses(CapacityError, WAITS.format(0, 4), cache.set_active_batch_size, 1)
        sequences.refuses(CapacityError, WAITS.format(0, 4), cache.reset_for_new_sequences, [1])

    def test_without_another_slot_it_can_be_pinned_there_and_the_slot_reset_to_its_length(self, make):
        cache, sequences = make()
        seqs = sequences.new(1, 2, 3, 4, 5)
        sequences.pin(seqs[4], slot=0)
        cache.reset_for_new_sequences([5])
        for seq in seqs:
            sequences.check(seq, seq + 1)

    def test_an_empty_one_stays_in_a_slot_that_begins_empty(self, make):
        cache, sequences = make()
        seqs = [sequences.create_sequence() for _ in range(B)]
        cache.set_active_batch_size(2)
        assert sequences.slots == [4, 3, 2, 1, 0]
        cache.commit_sequence_length([2, 1])
        assert [sequences.length(seq) for seq in seqs] == [0, 0, 0, 1, 2]

    def test_an_empty_one_leaves_a_slot_that_begins_with_tokens(self, make):
        cache, sequences = make(swapping=True)
        seqs = [sequences.create_sequence() for _ in range(B)]
        cache.reset_for_new_sequences([3])
        assert sequences.slots == [4, 3, 2, 1, None]
        assert sequences.length(seqs[4]) == 0

    def test_one_whose_length_only_the_device_knows_keeps_it(self, make, memory, stream):
        cache, sequences = make(swapping=True)
        seq = sequences.create_sequence()
        sequences.pin(seq, slot=0)
        cache.set_active_batch_size(1)
        cache.commit_sequence_length(on_device(memory, [2], stream), max_increment=3)
        cache.set_active_batch_size(0)
        sequences.unpin(seq)
        cache.set_active_batch_size(1)
        assert sequences.length(seq) == 2

    def test_where_the_host_has_no_room_the_active_batch_stays_as_it_is(self):
        memory = FailingMemory()
        cache, sequences = make_sequences(memory, memory.create_stream(), swapping=True)
        sequences.new(1, 2, 3, 4, 5)
        memory.failures = 1
        sequences.refuses(CapacityError, "no room.", cache.set_active_batch_size, 1)
        cache.set_active_batch_size(1)
        sequences.check(4, 5)
