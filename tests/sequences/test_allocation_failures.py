"""An allocation that fails while something is copied out of a slot, or into one, leaves nothing behind."""

import gc
from functools import partial

import pytest

from tests.helpers.caches import FailingMemory, cache_holding
from trt_kvcache import PromptCache, SequenceCacheManager
from trt_kvcache.errors import CapacityError
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.snapshot import Snapshot

MODEL = ModelIdentity(fingerprint="model")


def insert(place, cache, stream, _):
    if PromptCache(cache, max_bytes=1 << 20, place=place).insert([1, 2, 3], 0, stream=stream) is None:
        raise CapacityError("no room.")


def restore_an_entry(place, cache, stream, snapshot):
    if snapshot.restore_entry(PromptCache(cache, max_bytes=1 << 20, place=place), model=MODEL, stream=stream) is None:
        raise CapacityError("no room.")


def swap_out_and_in(cache, stream, _):
    """Run a sequence in slot 0, put it away, and bring it back where the slot is free, and into another one where it is not."""
    with SequenceCacheManager(cache, enable_swapping=True) as sequences:
        seq = sequences.create_sequence()
        cache.clear_slot(0, stream=stream)
        sequences.pin(seq, slot=0, stream=stream)
        cache.commit_sequence_length(2, stream=stream)
        sequences.unpin(seq, stream=stream)
        sequences.pin(seq, slot=0 if cache.host_kv_cache_lengths[0] == 0 else 3, stream=stream)


CALLS = {
    "sequences": (swap_out_and_in, 2),
    "insert": (partial(insert, "cache"), 3),
    "insert on the host": (partial(insert, "host"), 1),
    "a snapshot into a prompt cache": (partial(restore_an_entry, "cache"), 3),
    "a snapshot of a slot": (lambda cache, stream, _: Snapshot.of_slot(cache, 0, tokens=[1, 2, 3], model=MODEL, stream=stream), 1),
    "a snapshot into a slot": (lambda cache, stream, snapshot: snapshot.restore_slot(cache, 1, model=MODEL, stream=stream), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_allocation_that_fails_leaves_nothing_behind(name):
    call, allocations = CALLS[name]
    memory = FailingMemory()
    stream = memory.create_stream()
    with cache_holding("hybrid", memory, stream, 3) as cache:
        snapshot = Snapshot.of_slot(cache, 0, tokens=[1, 2, 3], model=MODEL, stream=stream)
        before = memory.live_nbytes
        gc.disable()  # release is not left to the garbage collector
        try:
            for n in range(allocations):
                memory.left, memory.failures = n, 99
                with pytest.raises(CapacityError, match=r"^no room\.$"):
                    call(cache, stream, snapshot)
                assert memory.live_nbytes == before
        finally:
            gc.enable()
        memory.failures = 0
        cache.reset_for_new_sequences([3], stream=stream)
        memory.left, memory.failures = allocations, 1
        call(cache, stream, snapshot)
        assert (memory.left, memory.failures, memory.live_nbytes) == (0, 1, before)
