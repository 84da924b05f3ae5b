"""``StepExecutor`` over a run of slots. What a session shows of it, order and failures, is in test_session_order.py."""

from __future__ import annotations

import numpy as np
from fakes import cache_rows, logits_after, recorded

from trt_kvcache.chunks import Chunk
from trt_kvcache.steps import StepExecutor


def test_a_run_of_slots_reads_its_own_start_index_and_leaves_the_others_alone():
    steps = StepExecutor(*recorded())
    steps.cache.reset_for_new_sequences([0, 0, 0], stream=steps.stream)
    steps.prefill(Chunk(0, (3, 2, 1)), [[1, 2, 3], [4, 5], [6]])
    cache = steps.cache
    before = cache_rows(cache)
    steps.prefill(Chunk(1, (4, 0)), [[7, 8, 9, 10], []])
    step = steps.engine.steps[-1]
    assert (step.start, step.input_ids, step.last) == ([2, 1], [[7, 8, 9, 10], [0, 0, 0, 0]], [3, 0])
    assert step.bound["kvcache_start_index"].ptr != cache.lengths.tensor.ptr
    assert step.bound["k_cache_1"].ptr == cache.get_separate_kv_cache(1)[0][1:].ptr
    assert cache.host_kv_cache_lengths == (3, 6, 1)
    np.testing.assert_array_equal(steps.logits(1), [logits_after([4, 5, 7, 8, 9, 10])])
    for slot in (0, 2):
        assert cache_rows(cache)[slot::3] == before[slot::3]
    steps.decode([11, 12, 13])
    assert steps.engine.steps[-1].start == [3, 6, 1]
    np.testing.assert_array_equal(steps.logits(3)[2], logits_after([6, 13]))
