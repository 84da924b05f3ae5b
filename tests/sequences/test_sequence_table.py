"""Which sequence is in which slot, whatever the owner of the cache does with its slots."""

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    B,
    Image,
    S,
    fill_all,
)
from tests.helpers.sequence_cases import LIMIT, TAKEN, TOKEN, make, tokens
from trt_kvcache.errors import (
    LengthsUnknown,
    SequenceError,
)

#: What is done to a sequence whose slot is active and holds five tokens, and how many it has afterwards; None if they are lost.
LEAVE, ENTER, RUN = ("set_active_batch_size", 0), ("set_active_batch_size", B), ("commit_sequence_length", 1)

FATES = [
    ([LEAVE], 5, 5),
    ([RUN, LEAVE], 6, 6),
    ([LEAVE, ENTER], None, None),
    ([LEAVE, ("reset_for_new_sequences", [0] * B)], None, None),
    ([LEAVE, ("reset_for_new_sequences", [0, 0, 0, 0, 4]), RUN], None, 5),
    ([LEAVE, ("reset_for_new_sequences", [0, 0, 0, 0, 6])], None, 6),
    ([("reset_for_new_sequences", [0] * B)], 0, 0),
    ([("reset_for_new_sequences", [1, 1]), ENTER], None, None),
    ([("clear_slot", 4), LEAVE, ENTER, RUN], 1, 1),
    ([("clear_slot", 4), LEAVE, ("reset_for_new_sequences", [0, 0, 0, 0, 2])], None, 2),
    ([("compact_batch", [0, 1, 2, 3, -1], 5, 4)], 5, 5),
    ([("compact_batch", [0, 1, 2, 3, -1], 5, 4), ENTER], None, None),
    ([("compact_batch", [-1, -1, -1, 0, -1], 5, 1), ("reset_for_new_sequences", [0, 0, 0, 0, 5])], None, 5),
    ([("compact_batch", [0, 4, 2, 3, 1], 5, 5), ("set_active_batch_size", 1)], 5, 5),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("calls", "unpinned", "pinned"), FATES)
def test_what_becomes_of_a_sequence(memory, stream, known, calls, unpinned, pinned):
    """Its tokens are never other ones, nor lost without an error, nor counted wrongly before anybody asks how many there are."""
    for pin, expected in ((False, unpinned), (True, pinned)):
        cache, sequences = make("manager", memory, stream)
        seq = sequences.create_sequence()
        if pin:
            sequences.pin(seq)
        cache.set_active_batch_size(B)
        cache.commit_sequence_length([0, 0, 0, 0, 4])
        cache.commit_sequence_length(
            [0, 0, 0, 0, 1] if known else memory.to_device(np.eye(5, dtype=np.int32)[4], stream=stream), **LIMIT[known]
        )
        for name, *arguments in calls:
            getattr(cache, name)(*arguments)
        if expected is None:
            sequences.refuses(SequenceError, f"sequence {seq}: {TAKEN}", sequences.length, seq)
            continue
        others = [bound for slot, bound in enumerate(cache.lengths.upper_bounds) if slot != sequences.slots[seq]]
        assert sequences.memory_used == (sum(others) + expected) * TOKEN["manager"]
        assert sequences.length(seq) == expected
        cache.close()


def test_a_full_sequence_takes_no_token_more(memory, stream):
    for kind in ("manager", "linear"):
        _, sequences = make(kind, memory, stream, states=False)
        (seq,) = sequences.new(S)
        sequences.append(seq, *tokens(sequences.cache, 0, 1))
        sequences.check(seq, S)


def test_a_slot_of_known_length_beside_one_that_only_the_device_knows(memory, stream):
    cache, sequences = make("manager", memory, stream)
    a, b = sequences.new(2, 3)
    cache.set_active_batch_size(2)
    for slot in (a, b):
        sequences.pin(slot, slot=slot)
    cache.commit_sequence_length(memory.to_device(np.array([1, 0], np.int32), stream=stream), max_increment=2)
    refused = "were changed by values that only the device has. Call sync_lengths(stream=) to read them."
    cache.clear_slot(1)
    assert sequences.length(b) == 0
    sequences.unpin(b)
    for call in (sequences.length, sequences.unpin, sequences.get):
        sequences.refuses(LengthsUnknown, f"the lengths of slots [0] {refused}", call, a)
    cache.set_active_batch_size(0)
    assert (sequences.memory_used, sequences.length(a), sequences.memory_used) == (4 * TOKEN["manager"], 3, 3 * TOKEN["manager"])


def test_tokens_that_nobody_looked_at(memory, stream):
    """They were committed while a sequence was in an active slot; then the slot is not active any more."""
    cache, sequences = make("manager", memory, stream, swapping=True)
    seq = sequences.create_sequence()
    fill_all(cache, stream)

    def run(before, *, mapping=None, look=False):
        sequences.pin(seq)
        cache.reset_for_new_sequences([0, 0, 0, 0, before])
        assert not look or sequences.length(seq) == before
        cache.commit_sequence_length(1)
        if mapping:
            cache.compact_batch(mapping, 5, 2)
        cache.set_active_batch_size(0)

    cache.set_active_batch_size(5)
    cache.commit_sequence_length(3)
    cache.set_active_batch_size(0)
    assert sequences.length(seq) == 3
    run(3, mapping=[-1, 0, 1, -1, -1])
    assert sequences.length(seq) == 4
    run(4)
    assert sequences.length(seq) == 5
    run(5, look=True)
    sequences.unpin(seq)
    expected = [(rows[4, which, :, :6].tobytes()) for rows in Image(cache).rows for which in (0, 1)]
    for other in [sequences.create_sequence() for _ in range(B)]:
        sequences.get(other)
    assert sequences.memory_swapped == 6 * TOKEN["manager"]
    assert [layer.tobytes() for pair in zip(*sequences.get(seq), strict=True) for layer in pair] == expected
    slot = sequences.pin(seq)
    for lengths in ([0] * slot + [6], [0] * B):
        cache.reset_for_new_sequences(lengths)
    for active in (0, B):
        cache.set_active_batch_size(active)
    assert sequences.length(seq) == 0


def test_a_sequence_follows_its_slot(memory, stream):
    cache, sequences = make("manager", memory, stream)
    for slot in range(B - 1):
        cache.set_active_batch_size(slot + 1)
        sequences.pin(sequences.create_sequence(), slot=slot)
        sequences.add(slot, slot + 1)
    cache.set_active_batch_size(B)
    a, b, c, d = range(4)
    cache.compact_batch([1, -1, 0, -1, 2], 5, 3)
    assert (sequences.length(a), sequences.length(c)) == (1, 3)
    for seq in (a, c, d):  # d was dropped, but not overwritten
        sequences.check(seq, seq + 1)
    sequences.refuses(SequenceError, f"sequence {b}: {TAKEN}", sequences.length, b)
    sequences.destroy_sequence(b)
    sequences.refuses(SequenceError, f"sequence {b}: it was destroyed.", sequences.destroy_sequence, b)
    cache.compact_batch(memory.to_device(np.arange(3, dtype=np.int32), stream=stream), 3, 3)
    cache.sync_lengths()
    assert sequences.length(a) == 1
    cache.compact_batch(memory.to_device(np.array([0, -1, 1], np.int32), stream=stream), 3, 2)
    for seq in (a, c):
        sequences.refuses(SequenceError, f"sequence {seq}: {TAKEN}", sequences.get, seq)
    sequences.unpin(d)
    cache.set_active_batch_size(3)
    assert sequences.num_sequences == 1
    cache.set_active_batch_size(4)  # of which d waits in the last
    sequences.refuses(SequenceError, f"sequence {d}: {TAKEN}", sequences.length, d)
    sequences.destroy_all_sequences()
    sequences.refuses(SequenceError, f"sequence {d}: it was destroyed.", sequences.length, d)
