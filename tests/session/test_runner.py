"""``Runner``: one enqueue and its commit, on one stream, over all slots or a run of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.recording import VOCAB, Journal, RecordingCache, RecordingEngine, RecordingMemory, kv_config, logits_after
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import BindingError, LayoutError
from trt_kvcache.session.chunks import Chunk
from trt_kvcache.session.runner import Runner
from trt_kvcache.session.step_plan import StepPlan


def make(**options):
    memory = RecordingMemory(Journal())
    kv = kv_config(**options)
    cache = RecordingCache(kv, memory=memory)
    engine = RecordingEngine(kv, memory)
    steps = Runner(engine, cache)
    memory.journal.take()
    return steps, engine, cache, memory.journal


def decode(steps, tokens, increment=1):
    steps.enqueue_decode(StepPlan.decode(tokens))
    steps.cache.commit_sequence_length(increment, stream=steps.stream)


def prompts(*counts):
    return StepPlan.of([[1] * count for count in counts])


@pytest.fixture
def made():
    return make()


def test_the_enqueue_reads_the_lengths_and_then_the_commit_adds_to_them(made):
    steps, engine, cache, journal = made
    cache.reset_for_new_sequences([0, 0], stream=steps.stream)
    steps.prefill(Chunk(0, (3, 2)), [[1, 2, 3], [4, 5]])
    journal.take()
    decode(steps, [6, 7])
    calls = journal.take()
    assert [call[0] for call in calls if call[0] not in ("bind", "set_input_shape")] == [
        "upload",
        "upload",
        "use_profile",
        "enqueue",
        "commit",
    ]
    assert {call[-1] for call in calls if call[0] in ("upload", "enqueue", "commit")} == {steps.stream}
    assert engine.steps[-1].start == [3, 2]
    assert cache.host_kv_cache_lengths == (4, 3)
    np.testing.assert_array_equal(steps.logits(2), [logits_after([1, 2, 3, 6]), logits_after([4, 5, 7])])


def test_an_idle_slot_is_computed_and_not_committed(made):
    steps, engine, cache, _ = made
    cache.reset_for_new_sequences([0, 0, 0], stream=steps.stream)
    steps.prefill(Chunk(0, (3, 2, 1)), [[1, 2, 3], [4, 5], [6]])
    decode(steps, [7, 8, 9], [1, 0, 1])
    assert cache.host_kv_cache_lengths == (4, 2, 2)
    decode(steps, [1, 2, 3], [1, 1, 0])
    assert engine.steps[-1].start == [4, 2, 2]
    np.testing.assert_array_equal(steps.logits(2), [logits_after([1, 2, 3, 7, 1]), logits_after([4, 5, 2])])


def test_a_run_of_slots_reads_its_own_start_index_and_leaves_the_others_alone(made):
    steps, engine, cache, _ = made
    cache.reset_for_new_sequences([0, 0, 0], stream=steps.stream)
    steps.prefill(Chunk(0, (3, 2, 1)), [[1, 2, 3], [4, 5], [6]])
    before = [view.numpy()[0].tobytes() for layer in (0, 1) for view in cache.get_separate_kv_cache(layer)]
    steps.prefill(Chunk(1, (4, 0)), [[7, 8, 9, 10], []])
    step = engine.steps[-1]
    assert (step.start, step.input_ids, step.last) == ([2, 1], [[7, 8, 9, 10], [0, 0, 0, 0]], [3, 0])
    assert step.bound["kvcache_start_index"].ptr != cache.lengths.tensor.ptr
    assert step.bound["k_cache_1"].ptr == cache.get_separate_kv_cache(1)[0][1:].ptr
    assert cache.host_kv_cache_lengths == (3, 6, 1)
    np.testing.assert_array_equal(steps.logits(1), [logits_after([4, 5, 7, 8, 9, 10])])
    assert [view.numpy()[0].tobytes() for layer in (0, 1) for view in cache.get_separate_kv_cache(layer)] == before
    decode(steps, [11, 12, 13])
    assert engine.steps[-1].start == [3, 6, 1]
    np.testing.assert_array_equal(steps.logits(3)[2], logits_after([6, 13]))


def test_the_plan_respects_the_engine_and_the_alignment():
    steps, *_ = make(limit=7)
    assert steps.chunks([0, 0], prompts(6, 5)) == [Chunk(0, (4, 4)), Chunk(0, (2, 1))]
    with pytest.raises(LayoutError, match=r"^slot 1: slot 0 before it is full"):
        steps.chunks([7, 0], prompts(0, 3))
    steps, *_ = make(limit=16)
    assert steps.chunks([16, 0], prompts(0, 3)) == [Chunk(1, (3,))]


def test_a_plan_that_no_profile_takes_is_refused():
    memory = RecordingMemory(Journal())
    kv = kv_config()
    profiles = [EngineProfile(name="all", min_batch=3, max_batch=3, min_width=1, max_width=4)]
    steps = Runner(RecordingEngine(kv, memory, profiles=profiles), RecordingCache(kv, memory=memory))
    assert steps.chunks([0, 0, 0], prompts(1, 2, 3)) == [Chunk(0, (1, 2, 3))]
    with pytest.raises(
        BindingError, match=r"^no optimisation profile takes 2 slots of 3 new tokens\. The engine has all: batch 3-3, width 1-4\.$"
    ):
        steps.chunks([0, 0], prompts(1, 3))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_float32(dtype):
    memory = RecordingMemory(Journal())
    kv = kv_config()
    cache = RecordingCache(kv, memory=memory)
    steps = Runner(RecordingEngine(kv, memory, logits_dtype=dtype), cache)
    cache.reset_for_new_sequences([0], stream=steps.stream)
    steps.prefill(Chunk(0, (2,)), [[1, 2]])
    logits = steps.logits(1)
    assert (logits.dtype, logits.shape) == (np.float32, (1, VOCAB))
    rounded = logits_after([1, 2]).astype(steps.plan.logits.dtype if dtype != "bfloat16" else logits.dtype)
    np.testing.assert_allclose(logits[0], rounded, rtol=2**-8 if dtype == "bfloat16" else 0)


def test_close_releases_its_memory(made):
    steps, _, cache, journal = made
    steps.synchronize()
    assert journal.take() == [("synchronize", steps.stream)]
    live = cache.memory.live_nbytes
    steps.close()
    steps.close()
    assert cache.memory.live_nbytes < live


class TestBuckets:
    def widths(self, *counts, limit=None, buckets=(1, 2, 3, 4, 6, 8), coarse=(1, 4, 8)):
        memory, kv = RecordingMemory(Journal()), kv_config(slots=3, limit=200)
        profiles = decoder_profiles(max_batch_size=3, max_prefill_length=buckets[-1])
        engine = RecordingEngine(kv, memory, profiles=profiles)
        engine.width_buckets, engine.coarse_width_buckets = buckets, coarse
        chunks = Runner(engine, RecordingCache(kv, memory=memory)).chunks([0] * len(counts), prompts(*counts), limit=limit)
        return [chunk.width for chunk in chunks]

    def test_a_prompt_alone_has_all_buckets(self):
        assert self.widths(3) == [3]
        assert self.widths(5) == [6]

    def test_a_prompt_next_to_decodes_has_the_coarse_ones(self):
        assert self.widths(3, limit=6) == [4]
        assert self.widths(5, limit=8) == [8]
        assert self.widths(9, limit=4) == [4, 4, 1]

    def test_or_all_in_an_engine_without_coarse_ones(self):
        assert self.widths(3, limit=6, coarse=()) == [3]
        assert self.widths(5, limit=8, coarse=()) == [6]

    def test_the_last_chunk_is_padded_to_a_coarse_one_however_much_that_is(self):
        buckets = (1, 2, 4, 64, 128)
        assert self.widths(70, limit=128, buckets=buckets, coarse=buckets) == [128]
        assert self.widths(70, limit=128, buckets=buckets, coarse=()) == [64, 4, 2]
