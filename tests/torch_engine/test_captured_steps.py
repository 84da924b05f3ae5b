"""Sessions whose steps are captured in buckets of width, over a stand-in for CUDA graphs, against sessions of exact widths and no graph.

A graph that is replayed for a step of other addresses or shapes shows: it computes the step that it was captured over.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.recording import poison
from tests.paths import GOLDEN
from tests.reference.rig import golden
from tests.torch_engine.needs_torch import need_torch

need_torch()

from tests.torch_engine.fake_cuda import FakeCuda, FakeCudaDevice  # noqa: E402
from tests.torch_engine.test_families import FAMILIES  # noqa: E402
from trt_kvcache import InferenceSession, KVCacheManager, SamplingParams  # noqa: E402
from trt_kvcache.torch_engine import engine  # noqa: E402
from trt_kvcache.torch_engine.step_widths import COARSE_WIDTHS, MAX_CAPTURED_WIDTH, STEP_WIDTHS  # noqa: E402

S, WIDTH = 48, 22
BUCKETS = {*range(1, 9), 12, 16, 17, WIDTH}


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def open_model(name, slots=3, **options):
    sizes = {"max_batch_size": slots, "max_sequence_length": S, "max_prefill_length": WIDTH}
    return InferenceSession.from_model(GOLDEN / name, engine="torch", dtype="float32", **sizes, **options)


def captured(cuda, monkeypatch, name, max_nbytes=10**8, **options):
    """Return a session with graphs, and its widths, as they are enqueued."""
    with monkeypatch.context() as patch:
        patch.setattr(engine, "torch_device", lambda memory: FakeCudaDevice(cuda, max_nbytes))
        session = open_model(name, **options)
    widths, run = [], session.engine.enqueue

    def note(stream):
        widths.append(session.engine._bindings.active._shape("input_ids")[1])
        run(stream)

    session.engine.enqueue = note
    return session, widths


def turns(session, ids):
    """Yield the logits of calls of every kind and many widths, each twice or more, near S too."""
    for _ in range(3):
        yield session.prefill([ids[:13], ids[4:7], ids[1:11]])
        yield session.decode([3, 4, 5])
        draft = session.verify([ids[2:7], ids[1:3], ids[:4]])
        yield np.concatenate([draft[0, :5], draft[1, :2], draft[2, :4]])
        session.accept([5, 1, 0])
        yield session.append([ids[:10], [7], ids[3:8]])
        yield session.decode([9, 8, 7])
        draft = session.verify([[5], ids[5:18], [6, 7]])
        yield np.concatenate([draft[0, :1], draft[1], draft[2, :2]])
        session.accept([1, 13, 2])
        yield session.append([ids[: S - len(session.tokens(0))], [3, 4], ids[:17]])  # slot 0 is full then
        yield session.prefill([ids[:19]])
        yield session.append([ids[:11]])
        yield session.decode([5])


def agree(session, exact, name):
    ids = golden(name)[0].tolist()
    for found, expected in zip(turns(session, ids), turns(exact, ids), strict=True):
        live = ~np.isnan(expected)
        assert_close(found[live], expected[live])
    assert session.tokens(0) == exact.tokens(0)


@pytest.mark.parametrize(("name", "attention"), list(zip(FAMILIES, cycle(["native", "mask", "plugin"]), strict=False)))
def test_logits_are_those_of_exact_widths(cuda, monkeypatch, name, attention):
    session, widths = captured(cuda, monkeypatch, name, attention=attention)
    with session, open_model(name, attention=attention) as exact:
        for one in (session, exact):
            poison(one.cache)
        agree(session, exact, name)
        assert cuda.replays > cuda.captures > 5
        assert set(widths) <= (BUCKETS | {13} if session.cache.states is not None else BUCKETS), "verifications of states are exact"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["gemma2-bias", "granitemoehybrid-bias"])
def test_quantized_kv(cuda, monkeypatch, name, kind):
    session, _ = captured(cuda, monkeypatch, name, kv_dtype=kind)
    with session, open_model(name, kv_dtype=kind) as exact:
        agree(session, exact, name)
        assert cuda.replays > cuda.captures > 5


def test_a_graph_reads_rows_that_were_added_after_its_capture(cuda, monkeypatch):
    session, _ = captured(cuda, monkeypatch, "llama", max_embeddings=4)
    ids, random = golden("llama")[0].tolist()[:3], np.random.default_rng(4)
    with session, open_model("llama", max_embeddings=4) as exact:
        for _ in range(4):
            rows = random.normal(size=(1, exact.model.hidden_size))
            found, expected = (one.prefill([[*ids, *one.add_embeddings(rows)]]) for one in (session, exact))
            assert_close(found, expected)
        assert cuda.replays > 1


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_budget_that_holds_few_graphs(cuda, monkeypatch, name):
    session, _ = captured(cuda, monkeypatch, name, max_nbytes=10**6)
    cuda.graph_nbytes = 3 * 10**5
    with session, open_model(name) as exact:
        agree(session, exact, name)
        assert 0 < len(session.engine._device.graphs) <= 3
        assert cuda.nbytes <= 10**6
    assert cuda.nbytes == 0


def test_each_bucket_and_number_of_slots_is_captured_once(cuda, monkeypatch):
    session, widths = captured(cuda, monkeypatch, "llama")
    with session:
        for _ in range(4):
            for count in range(1, 16):
                session.prefill([[5] * count])
        assert set(widths) == {*range(1, 9), 12, 16}
        assert cuda.captures == 10
        session.prefill([[5] * 9, [6] * 12])
        assert cuda.captures == 10
        session.prefill([[5] * 12, [6] * 10])
        assert cuda.captures == 11
        session.verify([[1, 2, 3], [4]])
        session.verify([[1], [4, 5, 6]])
        assert cuda.captures == 12, "all logits of three tokens are another step than those of the last"


def test_each_first_slot_has_graphs_of_its_own(cuda, monkeypatch):
    """Slot 1 alone is at other addresses than slot 0 alone."""
    session, _ = captured(cuda, monkeypatch, "llama")
    with session, open_model("llama") as exact:
        for one in (session, exact):
            one.prefill([[5, 6, 7], [8, 9]])
        for _ in range(4):
            for turn in ([[3, 4, 5], []], [[], [6, 7, 8]]):
                found, expected = session.append(turn), exact.append(turn)
                assert_close(found[~np.isnan(expected)], expected[~np.isnan(expected)])
        assert cuda.captures == 2


@pytest.mark.parametrize("name", ["bamba", "lfm2-bias"])
def test_each_order_of_the_buffers_of_states_has_graphs_of_its_own(cuda, monkeypatch, name):
    session, _ = captured(cuda, monkeypatch, name, slots=1)
    with session, open_model(name, slots=1) as exact:
        for one in (session, exact):
            one.prefill([[5, 6, 7]])
        before = cuda.captures
        for _ in range(6):
            assert_close(*(one.append([[3, 4]]) for one in (session, exact)))
        assert cuda.captures == before + 2


def test_requests_that_come_while_others_decode(cuda, monkeypatch):
    """The slot, the width and the number of slots of a prefill change all the time."""
    session, _ = captured(cuda, monkeypatch, "llama")
    ids = golden("llama")[0].tolist()
    params = [SamplingParams(max_new_tokens=6, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.9)]
    prompts = [ids[start : start + 1 + 2 * start] for start in range(9)] * 3
    with session, open_model("llama") as exact:
        found = []
        for one in (session, exact):
            handles = []
            for index, prompt in enumerate(prompts):
                handles.append(one.submit(prompt, params[index % 2]))
                one.step()
            while one.step():
                pass
            found.append([list(handle.tokens) for handle in handles])
        assert found[0] == found[1]
        assert cuda.replays > cuda.captures > 5


def test_a_step_that_fails_is_not_captured_and_changes_nothing(cuda, monkeypatch):
    session, _ = captured(cuda, monkeypatch, "llama")
    with session, open_model("llama") as exact:
        for one in (session, exact):
            one.prefill([[5, 6, 7]])
            one.append([[1, 2, 3, 4]])
        cuda.fails = RuntimeError("no graph today")
        for one in (session, exact):
            one.append([[1, 2, 3, 4]])
        assert session.statistics.graph_refusals == ("no graph today",)
        cuda.fails = KeyboardInterrupt()
        session.verify([[5, 6]])
        with pytest.raises(KeyboardInterrupt):
            session.verify([[5, 6]])
        cuda.fails = None
        assert session.tokens(0) == exact.tokens(0)
        assert_close(session.verify([[5, 6]]), exact.verify([[5, 6]]))
        assert_close(session.decode([3]), exact.decode([3]))


def test_steps_whose_rows_are_sorted_by_expert_are_not_captured(cuda, monkeypatch):
    with captured(cuda, monkeypatch, "qwen3_moe")[0] as session:
        ids = golden("qwen3_moe")[0].tolist()
        for _ in range(3):
            session.prefill([ids[:WIDTH]] * 3)
        assert cuda.captures == 0, f"{3 * WIDTH} rows"
        for _ in range(3):
            session.prefill([ids[:17]] * 3)
        assert cuda.captures == 1


def test_wide_and_large_steps_are_not_captured(cuda, monkeypatch):
    with captured(cuda, monkeypatch, "llama", slots=2)[0] as session:
        rows = session.engine._row_nbytes
        session.engine._device.graphs.max_nbytes = 2 * 12 * rows
        for _ in range(3):
            session.prefill([[5] * 12])
        assert cuda.captures == 1
        for _ in range(3):
            session.prefill([[5] * 12, [6]])
            session.prefill([[5] * 13])
        assert cuda.captures == 1
        monkeypatch.setattr(engine, "MAX_CAPTURED_WIDTH", 5)
        for _ in range(3):
            session.prefill([[5] * 6])
        assert cuda.captures == 1


def test_a_cache_that_was_closed_is_not_kept_alive(cuda, monkeypatch):
    with captured(cuda, monkeypatch, "llama")[0] as session:
        for count in (2, 3, 5):
            session.prefill([[6] * count])
        steps = session.engine._steps
        assert len(steps) == 3
        session.cache.close()
        other = InferenceSession(session.engine, KVCacheManager(session.cache.kv_config, memory=session.cache.memory))
        other.prefill([[6, 7]])
        assert len(steps) == 1
        assert not any(step.closed for step in steps)


def test_padding_of_a_width_is_at_most_one_row_in_nine_where_it_costs_time():
    assert list(STEP_WIDTHS) == sorted(set(STEP_WIDTHS))
    assert MAX_CAPTURED_WIDTH == STEP_WIDTHS[-1] == COARSE_WIDTHS[-1] == 1024
    assert list(COARSE_WIDTHS) == sorted(set(COARSE_WIDTHS) & set(STEP_WIDTHS))
    for count in range(1, 1025):
        width = next(width for width in STEP_WIDTHS if width >= count)
        assert count > 8 or width == count
        assert width < 2 * count
        assert count <= 64 or 9 * (width - count) < width
