"""What holds for every manager: nothing waits or allocates, and a failure leaves nothing. Old bugs by name: test_capture.py."""

import gc
import os
from functools import partial

import pytest

from tests.helpers.cache_cases import KINDS, FailingMemory, cache_holding, make_cache, on_device
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache import PromptCache
from trt_kvcache.errors import CapacityError, CaptureError
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.snapshot import Snapshot

MODEL = ModelIdentity(fingerprint="model")


def test_lengths_of_the_contract(memory, stream):
    with make_cache("manager", memory, max_sequence_length=16) as cache:
        cache.reset_for_new_sequences([0, 5, 0], stream=stream)
        cache.set_active_batch_size(2, stream=stream)
        cache.commit_sequence_length(7, stream=stream)
        assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()) == ((7, 12), [7, 12])


@needs_standin
@pytest.mark.parametrize("kind", KINDS)
def test_reset_commit_and_compaction_neither_wait_nor_allocate(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        ones, mapping = (on_device(memory, values, stream) for values in ([1, 1, 1], [0, -1]))
        for _ in range(2):  # the first time loads the kernels
            standin = StandIn()
            cache.reset_for_new_sequences([3, 0, 1], stream=stream)
            cache.commit_sequence_length(1, stream=stream)
            cache.commit_sequence_length([1, 0, 2], stream=stream)
            cache.commit_sequence_length(ones, max_increment=1, stream=stream)
            cache.compact_batch([1, -1, 0], 3, 2, stream=stream)
            cache.compact_batch(mapping, 2, 1, stream=stream)
            made = standin.take_calls()
        assert made
        assert not {*made} & (WAITS | ALLOCATIONS)
        cache.sync_lengths(stream=stream)
        assert cache.host_kv_cache_lengths == (5,)


@pytest.mark.skipif(os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host") == "host", reason="CUDA graphs: on the emulated device and on a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_replays_commits(memory, stream, kind):
    with make_cache(kind, memory) as cache:
        new = on_device(memory, [1, 2], stream)
        cache.reset_for_new_sequences([0, 0], stream=stream)
        cache.commit_sequence_length(new, max_increment=2, stream=stream)  # loads the kernel
        cache.reset_for_new_sequences([1, 0], stream=stream)
        memory.synchronize(stream)
        builder = stream.create_graph_builder().begin_building()
        cache.commit_sequence_length(1, stream=builder)
        cache.commit_sequence_length(new, max_increment=2, stream=builder)
        for call in (cache.commit_sequence_length, cache.reset_for_new_sequences):
            with pytest.raises(CaptureError):
                call([0, 1], stream=builder)
        graph = builder.end_building().complete()
        assert (cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()) == ((1, 0), [1, 0])
        for _ in range(2):
            cache.lengths.replayed(1)
            cache.lengths.replayed(2, exact=False)
            graph.launch(stream)
        cache.sync_lengths(stream=stream)
        assert cache.host_kv_cache_lengths == (5, 6)


def insert(place, cache, stream, _):
    if PromptCache(cache, max_bytes=1 << 20, place=place).insert([1, 2, 3], 0, stream=stream) is None:
        raise CapacityError("no room.")


def take_in(place, cache, stream, snapshot):
    if snapshot.restore_entry(PromptCache(cache, max_bytes=1 << 20, place=place), model=MODEL, stream=stream) is None:
        raise CapacityError("no room.")


CALLS = {
    "insert": (partial(insert, "cache"), 3),
    "insert on the host": (partial(insert, "host"), 1),
    "a snapshot into a prompt cache": (partial(take_in, "cache"), 3),
    "a snapshot of a slot": (lambda cache, stream, _: Snapshot.of_slot(cache, 0, tokens=[1, 2, 3], model=MODEL, stream=stream), 1),
    "a snapshot into a slot": (lambda cache, stream, snapshot: snapshot.restore_slot(cache, 1, model=MODEL, stream=stream), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_allocation_that_fails_leaves_nothing_behind(name):
    """Managers: test_bad_inputs."""
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
