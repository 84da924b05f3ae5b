"""What rows say of times, on a clock that the engine moves; nothing here depends on how fast the machine is."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.sessions import make
from tests.paths import GOLDEN
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.benchmarking import BenchmarkCase, CacheTraffic, MeanDeviation, MemoryLimit, MemoryUse, Percentiles, measure
from trt_kvcache.errors import CapacityError, ConfigError


class Clock:
    """Moves only when the engine runs: each enqueue takes the next of some durations, the last one again and again."""

    def __init__(self, session, durations):
        self.now = 0.0
        self.durations = list(durations)
        enqueue = session.engine.enqueue

        def slow_enqueue(stream):
            self.now += self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]
            enqueue(stream)

        session.engine.enqueue = slow_enqueue

    def __call__(self):
        return self.now


@pytest.fixture
def session():
    with make(limit=16) as made:
        yield made


def only_row(session, case, durations, **options):
    (row,) = measure(session, [case], clock=Clock(session, durations), **options)
    return row


def test_a_prompt_is_timed_until_its_first_token(session):
    row = only_row(session, BenchmarkCase(prompt_tokens=4, batch_size=2), [100.0, 2.0, 4.0], runs=2, warmup=1)
    assert row.tokens_per_second == MeanDeviation.of([2 * 4 / 2.0, 2 * 4 / 4.0])
    assert row.time_to_first_token == MeanDeviation.of([2.0, 4.0])
    assert (row.inter_token_latency, row.generation_seconds, row.runs, row.warmup) == (None, None, 2, 1)


def test_decode_steps_are_timed_from_the_first_token_to_the_last(session):
    row = only_row(session, BenchmarkCase(generate_tokens=3, batch_size=2), [50.0, 1.0, 2.0, 5.0], runs=1, warmup=0)
    assert row.tokens_per_second == MeanDeviation(2 * 3 / 8.0, 0.0)
    assert row.time_to_first_token == MeanDeviation(50.0, 0.0)
    assert row.inter_token_latency == Percentiles.of([1.0, 2.0, 5.0])
    assert row.generation_seconds == 8.0


def test_both_together_count_all_tokens_over_all_of_the_time(session):
    row = only_row(session, BenchmarkCase(prompt_tokens=4, generate_tokens=2), [3.0, 1.0, 2.0], runs=1, warmup=0)
    assert row.tokens_per_second == MeanDeviation((4 + 2) / 6.0, 0.0)
    assert (row.time_to_first_token.mean, row.generation_seconds) == (3.0, 3.0)


def test_latencies_are_those_of_all_runs(session):
    row = only_row(session, BenchmarkCase(generate_tokens=1), [9.0, 1.0, 9.0, 4.0, 9.0, 7.0], runs=3, warmup=0)
    assert row.inter_token_latency == Percentiles.of([1.0, 4.0, 7.0])
    assert row.generation_seconds == 4.0


def test_the_depth_is_filled_once_and_not_timed(session):
    cases = [BenchmarkCase(prompt_tokens=2, depth=3), BenchmarkCase(generate_tokens=1, depth=3)]
    clock = Clock(session, [1000.0, 2.0])
    rows = list(measure(session, cases, runs=2, warmup=1, clock=clock))
    assert [row.time_to_first_token for row in rows] == [MeanDeviation(2.0, 0.0)] * 2
    assert len(session.engine.steps) == 1 + 3 + 3 * 2
    assert len(session.tokens(0)) == 3 + 1 + 1


def test_another_batch_fills_the_slots_again(session):
    cases = [BenchmarkCase(prompt_tokens=2, depth=5), BenchmarkCase(prompt_tokens=2, depth=5, batch_size=2)]
    list(measure(session, cases, runs=1, warmup=0, clock=Clock(session, [1.0])))
    assert [len(session.tokens(slot)) for slot in (0, 1)] == [7, 7]


def test_prompts_are_random_tokens_of_the_seed_and_new_in_each_run(session):
    def prompts(seed):
        seen = []
        case = BenchmarkCase(prompt_tokens=8)
        list(
            measure(session, [case], runs=2, warmup=0, seed=seed, on_run=lambda case, done, total: done and seen.append(session.tokens(0)))
        )
        return seen

    first, second = prompts(1)
    assert first != second
    assert [first, second] == prompts(1)
    assert [first, second] != prompts(2)
    assert all(0 <= token < session.vocab_size for token in first)


def test_end_tokens_end_nothing():
    with make(limit=16, eos_token_ids=tuple(range(263))) as session:
        params = SamplingParams(stop_token_ids=tuple(range(263)))
        row = only_row(session, BenchmarkCase(generate_tokens=5), [1.0], runs=1, warmup=0, params=params)
    assert row.generation_seconds == 5.0


def test_each_run_is_reported(session):
    seen = []
    cases = [BenchmarkCase(prompt_tokens=1), BenchmarkCase(generate_tokens=1)]
    list(measure(session, cases, runs=2, warmup=1, on_run=lambda case, done, total: seen.append((case.name, done, total))))
    assert seen == [(name, done, 3) for name in ("pp1", "tg1") for done in range(4)]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"cases": [BenchmarkCase(prompt_tokens=17)]}, CapacityError, "pp17: expected at most 16 tokens in a slot"),
        ({"cases": []}, ConfigError, "cases: expected at least one"),
        ({"runs": 0}, ConfigError, "runs: expected"),
        ({"warmup": -1}, ConfigError, "warmup: expected"),
        ({"seed": -1}, ConfigError, "seed: expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_refused_before_anything_runs(session, options, kind, text):
    session.prefill([[1, 2, 3]])
    with pytest.raises(kind, match=f"^{text}"):
        measure(session, **{"cases": [BenchmarkCase(prompt_tokens=1)], **options})
    assert (session.tokens(0), len(session.engine.steps)) == ((1, 2, 3), 1)


class TestLimit:
    limit = MemoryLimit(weights_nbytes=9999, step_weights_nbytes=1000, copy_bytes_per_second=500.0)

    def test_bytes_are_the_weights_of_each_step_and_what_the_slots_hold_in_it(self):
        case = BenchmarkCase(prompt_tokens=6, generate_tokens=3, batch_size=2, depth=7)
        by_hand = sum(1000 + 2 * held * 10 for held in (14, 15, 16))
        assert self.limit.generation_nbytes(case, CacheTraffic(rows=((10, None),), states_nbytes=0)) == by_hand

    def test_experts_that_no_token_chooses_are_not_read(self):
        """One token reads a quarter of the experts; of two, the second reads a quarter of what the first one has left."""
        limit = MemoryLimit(
            weights_nbytes=9999, step_weights_nbytes=1000, copy_bytes_per_second=1.0, experts_nbytes=800, num_experts=8, experts_per_token=2
        )
        assert [limit.step_nbytes(batch_size) for batch_size in (1, 2, 400)] == [400, 550, 1000]
        assert [self.limit.step_nbytes(batch_size) for batch_size in (1, 7)] == [1000, 1000]
        case = BenchmarkCase(generate_tokens=3, batch_size=2)
        assert limit.generation_nbytes(case, CacheTraffic(rows=(), states_nbytes=0)) == 3 * 550

    def test_rows_outside_a_window_are_not_read_and_states_are_read_and_written(self):
        case = BenchmarkCase(prompt_tokens=6, generate_tokens=3, batch_size=2, depth=7)
        by_hand = sum(1000 + 2 * (held * 10 + min(held, 15) * 4 + 100) for held in (14, 15, 16))
        assert self.limit.generation_nbytes(case, CacheTraffic(rows=((10, None), (4, 15)), states_nbytes=100)) == by_hand

    def test_the_share_is_the_time_of_the_copy_over_the_measured_time(self, session):
        row = only_row(session, BenchmarkCase(generate_tokens=2), [1.0, 6.0, 4.0], runs=1, warmup=0)
        assert row.kv_bytes_per_token == 2 * 3 * 16 * 4
        assert self.limit.share(row) == pytest.approx((2 * 1000 + (2 + 3) * row.kv_bytes_per_token) / 500 / 10)

    def test_a_row_without_decode_steps_has_none(self, session):
        assert self.limit.share(only_row(session, BenchmarkCase(prompt_tokens=2), [1.0], runs=1, warmup=0)) is None


def test_spread():
    assert MeanDeviation.of([2.0]) == MeanDeviation(2.0, 0.0)
    assert MeanDeviation.of([1.0, 3.0]) == MeanDeviation(2.0, pytest.approx(2**0.5))
    assert Percentiles.of(np.arange(101)) == Percentiles(50.0, 95.0, 99.0)


def test_the_memory_of_the_process_is_known(session):
    row = only_row(session, BenchmarkCase(prompt_tokens=2), [1.0], runs=1, warmup=0)
    assert row.memory is None or row.memory == MemoryUse(row.memory.nbytes, "process")
    assert row.memory is None or row.memory.nbytes > 1 << 20


def test_a_case_without_depth_between_two_with_one_has_the_slots_filled_again(session):
    deep = BenchmarkCase(prompt_tokens=2, depth=5)
    list(measure(session, [deep, BenchmarkCase(prompt_tokens=3), deep], runs=1, warmup=0))
    assert len(session.tokens(0)) == 7


def test_the_choice_of_the_tokens_of_all_slots_is_included(session):
    clock = Clock(session, [10.0])

    def slow_choice(tokens, logits):
        clock.now += 1.0
        return logits

    params = SamplingParams(logits_processors=[slow_choice])
    (row,) = measure(session, [BenchmarkCase(prompt_tokens=2, batch_size=3)], runs=1, warmup=0, params=params, clock=clock)
    assert row.time_to_first_token.mean == 13.0


@pytest.mark.parametrize("model", ["lfm2", "mamba2"])
def test_states_cannot_go_back_so_the_depth_is_run_again_and_not_timed(model):
    cases = [BenchmarkCase(prompt_tokens=2, depth=5, batch_size=2), BenchmarkCase(generate_tokens=2, depth=5, batch_size=2)]
    with InferenceSession.from_model(GOLDEN / model, engine="reference", max_batch_size=2, max_sequence_length=16) as session:
        prompt, steps = [1000.0, 2.0], [1000.0, 3.0, 4.0, 5.0]  # 1000 for the depth
        rows = list(measure(session, cases, runs=2, warmup=1, clock=Clock(session, prompt * 3 + steps * 3)))
        assert [row.time_to_first_token for row in rows] == [MeanDeviation(2.0, 0.0), MeanDeviation(3.0, 0.0)]
        assert rows[1].generation_seconds == 9.0
        assert [len(session.tokens(slot)) for slot in (0, 1)] == [5 + 1 + 2] * 2
