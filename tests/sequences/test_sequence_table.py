"""Which sequence is in which slot, whatever the owner of the cache does with its slots."""

import pytest

from tests.helpers.cache_cases import B, Image, fill_all, on_device
from tests.helpers.sequence_cases import LOST, TOKEN, slots_of
from trt_kvcache.errors import LengthsUnknown, SequenceError

#: How the last token of a sequence is committed: so that the host knows it, or only the device.
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["known to the host", "known to the device"])

#: What is done to a sequence whose slot, the last one, is active and holds five tokens; how many it has afterwards if it is not
#: pinned, and if it is. None if they are lost.
LEAVE, ENTER, RUN = ("set_active_batch_size", 0), ("set_active_batch_size", B), ("commit_sequence_length", 1)
RESET, COMPACT, CLEAR = "reset_for_new_sequences", "compact_batch", ("clear_slot", B - 1)
FATES = {
    "its slot leaves the batch": ([LEAVE], 5, 5),
    "it runs and its slot leaves the batch": ([RUN, LEAVE], 6, 6),
    "its slot leaves and enters empty": ([LEAVE, ENTER], None, None),
    "its slot leaves and is reset to nothing": ([LEAVE, (RESET, [0] * B)], None, None),
    "its slot leaves, is reset to fewer tokens, and runs": ([LEAVE, (RESET, [0, 0, 0, 0, 4]), RUN], None, 5),
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
    for name, *arguments in calls:
        getattr(cache, name)(*arguments)
    expected = pinned if pin else unpinned
    if expected is None:
        sequences.refuses(SequenceError, f"sequence {seq}: {LOST}", sequences.length, seq)
        return
    others = [bound for slot, bound in enumerate(cache.lengths.upper_bounds) if slot != sequences.slots[seq]]
    assert sequences.memory_used == (sum(others) + expected) * TOKEN["manager"]
    assert sequences.length(seq) == expected


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

    def test_one_that_waits_is_lost_where_its_slot_is_made_active(self, both):
        cache, sequences = both
        cache.compact_batch([0, 1, 2, -1, -1], 5, 3)
        sequences.unpin(3)
        cache.set_active_batch_size(B)
        sequences.refuses(SequenceError, f"sequence 3: {LOST}", sequences.length, 3)
