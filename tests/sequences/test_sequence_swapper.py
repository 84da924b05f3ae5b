"""Sequences on the host: which go, when they come back, and that nothing is lost on the way."""

from functools import partial

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    B,
    Image,
    Unchanged,
    fill_all,
)
from tests.helpers.sequence_cases import STATES, TOKEN, handles, make, raw, three_swaps, tokens
from tests.simt.standin import ALLOCATIONS, StandIn, needs_standin
from trt_kvcache import HostMemory
from trt_kvcache.errors import (
    CapacityError,
    ConfigError,
)


def test_the_one_used_longest_ago_goes_and_no_pinned_active_or_used_one(memory, stream):
    cache, sequences = make("manager", memory, stream, swapping=True)
    cache.reset_for_new_sequences([2])
    a, b, c, d = sequences.new(1, 1, 1, 1)
    assert sequences.slots == [4, 3, 2, 1]
    sequences.get(a)
    assert sequences.pin(b) == 3
    e = sequences.create_sequence()
    assert sequences.slots[e] is None
    sequences.get(e)
    assert sequences.slots == [4, 3, None, 1, 2]
    sequences.truncate(c, 1, stream=memory.create_stream())  # d makes way, and c is in another slot
    assert sequences.slots == [4, 3, 1, None, 2]
    for seq in (a, c, e):
        sequences.pin(seq)
    sequences.reserve(0)
    full = "expected 1 free slots, got 0 of 5. All are active or pinned."
    sequences.refuses(CapacityError, f"reserve: {full}", sequences.reserve, 1)
    sequences.refuses(CapacityError, f"create_sequence: {full}", sequences.create_sequence)
    text = f"sequence {d} has no slot, and all slots are active or pinned. Nothing was changed."
    sequences.refuses(CapacityError, text, sequences.get, d)
    for seq in (c, a):
        sequences.unpin(seq)
    sequences.reserve(9)
    assert sequences.pin(d) == 1
    assert raw(sequences.get(c, stream=memory.create_stream())) == raw(tokens(cache, 1, c))
    assert sequences.slots[a] is None
    sequences.check(d, 1)
    sequences.destroy_sequence(c)
    sequences.reserve(9)  # one slot is free, and enough
    cache.reset_for_new_sequences([1] * B)  # all of them are run now
    sequences.refuses(CapacityError, f"create_sequence: {full}", sequences.create_sequence)
    sequences.unpin(d)
    assert sequences._table.find(d).slot is None, "no slot is left for it but the host"
    sequences.check(b, 1)
    sequences.refuses(CapacityError, text, sequences.get, d)


def test_no_more_than_need_be_goes(memory, stream):
    _, sequences = make("manager", memory, stream, swapping=True, threshold=0.16)  # of 35 tokens: 5.6
    sequences.new(*[1] * 6)
    assert sequences.memory_swapped == TOKEN["manager"]
    sequences.destroy_all_sequences()
    sequences.new(0, 3, 3)
    assert sequences.slots == [4, None, 2], "without tokens nothing is gained"


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_run_by_an_engine_put_away_with_its_states_and_run_again_elsewhere(memory, stream, kind, ping_pong):
    cache, sequences = make(kind, memory, stream, swapping=True, ping_pong=ping_pong)
    fill_all(cache, stream)
    expected = Image(cache)
    seq = sequences.create_sequence()
    for active, slot, zeroed in ((0, None, [4]), (2, 1, [0, 1])):
        cache.set_active_batch_size(active)
        assert sequences.pin(seq, slot=slot) == zeroed[-1]
        expected.zero_states(*zeroed)
        expected.check(cache)
    fill_all(cache, stream, 1)  # what an engine does
    cache.commit_sequence_length([0, 5])
    held = Image(cache)
    assert (sequences.length(seq), sequences.memory_used) == (5, 5 * TOKEN[kind] + (1 + ping_pong) * STATES)
    expected = Image(cache)
    sequences.unpin(seq)
    expected.move(4, held, 1, 5)
    for into, states in zip(expected.next_states, held.states, strict=True):  # others may be swapped while it waits
        into[4] = states[1]
    expected.check(cache)
    assert (cache.host_kv_cache_lengths, sequences.length(seq)) == ((0, 5), 5)
    cache.clear_slot(1)
    cache.swap()
    for _ in range(3):
        sequences.pin(sequences.create_sequence())
    assert sequences.memory_swapped == 5 * TOKEN[kind] + STATES
    fill_all(cache, stream, 2)
    expected = Image(cache)
    assert sequences.pin(seq, slot=0) == 0
    expected.move(0, held, 1, 5)
    expected.check(cache)
    for which, arrays in enumerate(sequences.get(seq)):
        for rows, array in zip(held.rows, arrays, strict=True):
            assert np.array_equal(array.view(np.uint8), rows[1, which, :, :5])
    assert (cache.host_kv_cache_lengths, cache.lengths.tensor.numpy().tolist()[:2], sequences.memory_swapped) == ((5, 0), [5, 0], 0)
    text = "the cache has recurrent layers, whose states only an engine can update. Pin the sequence and run it."
    sequences.refuses(ConfigError, f"append: {text}", sequences.append, seq, [], [])
    sequences.refuses(ConfigError, f"truncate: {text}", sequences.truncate, seq, 1)
    cache.set_active_batch_size(0)
    sequences.destroy_all_sequences()
    for empty in [sequences.create_sequence() for _ in range(B + 1)]:
        sequences.get(empty)
    assert (sequences.num_sequences, sequences.memory_swapped) == (B + 1, 0)


@pytest.mark.parametrize("leave", [("set_active_batch_size", 1), ("compact_batch", [0, -1], 2, 1), ("reset_for_new_sequences", [0])])
@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_states_of_a_slot_that_leaves_are_not_swapped_away(memory, stream, kind, leave):
    cache, sequences = make(kind, memory, stream, ping_pong=True)
    seq = sequences.create_sequence()
    cache.set_active_batch_size(2)
    sequences.pin(seq, slot=1)
    cache.commit_sequence_length(3)
    fill_all(cache, stream)
    expected = Image(cache)
    getattr(cache, leave[0])(*leave[1:])
    for into, states in zip(expected.next_states, expected.states, strict=True):
        into[1] = states[1]
    if leave[0].startswith("reset"):
        expected.zero_states(0)
    expected.check(cache)
    cache.swap()
    sequences.unpin(seq)
    cache.clear_slot(0)
    assert sequences.pin(seq, slot=0) == 0
    for array, states in zip(Image(cache).states, expected.states, strict=True):
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


def test_host_arrays_are_waited_for():
    memory = LateMemory()
    cache, sequences = make("manager", memory, memory.create_stream(), swapping=True)
    seq, new = sequences.create_sequence(), tokens(cache, 2, 0)
    expected = raw(new)
    sequences.append(seq, *new)
    for array in (*new[0], *new[1]):
        array[...] = 0
    assert raw(sequences.get(seq)) == expected
    for other in [sequences.create_sequence() for _ in range(B)]:
        sequences.pin(other)
        assert not memory.late
    assert raw([sequences._table.find(seq).saved.arrays]) == [expected[i] for i in (0, 3, 1, 4, 2, 5)]
    sequences.unpin(other)
    assert (sequences.pin(seq), memory.late) == (4, [])


@pytest.mark.parametrize("swapping", [False, True])
def test_into_a_certain_slot(memory, stream, swapping):
    cache, sequences = make("manager", memory, stream, swapping=swapping)
    cache.reset_for_new_sequences([0, 2])
    a, b, c = sequences.new(1, 2, 3)  # in slots 4, 3, 2

    def refused(seq, slot, text):
        sequences.refuses(CapacityError, f"{text} Nothing was changed.", sequences.pin, seq, slot=slot)

    assert (sequences.pin(a, slot=2), sequences.slots) == (2, [2, 3, 4])  # c goes where a was
    refused(b, 2, f"slot 2 holds sequence {a}, which is active or pinned.")
    refused(b, 1, "slot 1 is active and not empty. Clear it before.")
    assert (sequences.pin(a, slot=0), sequences.slots) == (0, [0, 3, 4])
    assert cache.host_kv_cache_lengths == (1, 2)
    refused(b, 0, f"slot 0 holds sequence {a}, which is active or pinned.")
    d = sequences.create_sequence()
    if swapping:  # from an active slot, which is not free for c
        assert (sequences.pin(a, slot=4), sequences.slots) == (4, [4, 3, None, 2])
        assert sequences.memory_swapped == 3 * TOKEN["manager"]
    else:
        refused(a, 4, f"sequence {c} must leave slot 4, and no other is free.")
        sequences.destroy_sequence(d)
        assert (sequences.pin(a, slot=4), sequences.slots) == (4, [4, 3, 2])
    assert cache.host_kv_cache_lengths == (1, 2), "the slot that it left is its runner's"
    for seq in (a, b, c):
        sequences.check(seq, seq + 1)


def test_no_room_on_the_host():
    class Full(HostMemory):
        left = 99

        def staging(self, shape, dtype):
            self.left -= 1
            if self.left < 0:
                raise CapacityError("no room.")
            return super().staging(shape, dtype)

    memory = Full()
    for which, n in ((0, 0), (1, 0), (1, 1), (2, 0)):
        cache, sequences, calls = three_swaps(memory, memory.create_stream())
        memory.left = n
        sequences.refuses(CapacityError, "no room.", calls[which])
        memory.left = 99
        calls[which]()
        for seq in (1, 2):
            sequences.check(seq, 4)
        cache.close()


@needs_standin
def test_page_locked_memory_is_all_that_swapping_allocates(memory, stream):
    cache, sequences, calls = three_swaps(memory, stream)
    standin = StandIn()
    before = handles(sequences)
    standin.fail_allocation(1)
    with Unchanged(cache), pytest.raises(CapacityError, match="page-locked host memory"):
        calls[0]()
    assert handles(sequences) == before
    standin.take_calls()
    calls[0]()
    assert [call for call in standin.take_calls() if call in ALLOCATIONS] == ["cuMemAllocHost_v2"]
    assert standin.page_locked_nbytes == sequences.memory_swapped == 4 * TOKEN["manager"]
    sequences.check(1, 4)
    sequences.destroy_all_sequences()
    assert (standin.page_locked_nbytes, standin.device_nbytes) == (0, 0)
