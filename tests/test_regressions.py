"""What the original got wrong, by name, and what holds for every manager: nothing waits or allocates, and a failure leaves nothing."""

import gc
import os
from functools import partial

import numpy as np
import pytest
from cache_cases import KINDS, CapturingMemory, Image, fill_all, make_cache
from simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from slot_cases import cache_holding

from trt_kvcache import PromptCache
from trt_kvcache.errors import CapacityError, CaptureError
from trt_kvcache.snapshot import Snapshot
from trt_kvcache.snapshot_records import ModelIdentity

MODEL = ModelIdentity(fingerprint="model")


# FP8 pointer stride and head dim 512: test_capture.test_old_bugs.
@pytest.mark.parametrize("old", range(1, 5))
@pytest.mark.parametrize("kind", ["linear", "mamba", "hybrid"])
def test_states_where_the_old_batch_is_smaller_than_the_cache(memory, stream, kind, old):
    """The original stepped from layer to layer by the old batch, so that later layers got the states of other slots."""
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([1] * old, stream=stream)
        fill_all(cache, stream)
        expected = Image(cache)
        mapping = [-1 if slot == 0 and old > 2 else old - 1 - slot for slot in range(old)]
        expected.compact(mapping, [1] * old)
        cache.compact_batch(mapping, old, old - (old > 2), stream=stream)
        expected.check(cache)


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
        ones, mapping = (memory.to_device(np.array(values, np.int32), stream=stream) for values in ([1, 1, 1], [0, -1]))
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
        new = memory.to_device(np.array([1, 2], np.int32), stream=stream)
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


class FullMemory(CapturingMemory):
    """Host memory of which each allocation after the next ``left`` fails."""

    left = 1000

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise CapacityError("no room.")

    def allocate(self, *arguments, **keywords):
        self._count()
        return super().allocate(*arguments, **keywords)

    def staging(self, *arguments):
        self._count()
        return super().staging(*arguments)


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
    memory = FullMemory()
    stream = memory.create_stream()
    with cache_holding("hybrid", memory, stream, 3) as cache:
        snapshot = Snapshot.of_slot(cache, 0, tokens=[1, 2, 3], model=MODEL, stream=stream)
        before = memory.live_nbytes
        gc.disable()  # release is not left to the garbage collector
        try:
            for n in range(allocations):
                memory.left = n
                with pytest.raises(CapacityError, match=r"^no room\.$"):
                    call(cache, stream, snapshot)
                assert memory.live_nbytes == before
        finally:
            gc.enable()
        cache.reset_for_new_sequences([3], stream=stream)
        memory.left = allocations
        call(cache, stream, snapshot)
        assert (memory.left, memory.live_nbytes) == (0, before)
