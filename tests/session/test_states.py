"""Sessions over models with recurrent or conv states: what a slot holds is never a token ahead of, or behind, what it says."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from tests.helpers.assertions import assert_close, raises
from tests.helpers.recording import cache_rows, poison
from tests.helpers.sessions import ahead
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS
from tests.sweeps import one_of_each_family
from trt_kvcache import HostMemory, HybridCacheConfig, HybridCacheManager, InferenceSession, ModelConfig, SamplingParams
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, EngineError, RangeError, ShapeError
from trt_kvcache.session.runner import Runner

S = 24


def _has_states(folder):
    return bool(ModelConfig.from_dict(json.loads((folder / "config.json").read_text())).recurrent_layers)


#: Golden models with states.
MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors") if _has_states(path.parent))

every_model = pytest.mark.parametrize("name", one_of_each_family(MODELS))


def open_model(name, *, slots=3, width=5, **options):
    sizes = {"max_batch_size": slots, "max_sequence_length": S, "max_prefill_length": width}
    return InferenceSession.from_model(GOLDEN / name, **{"engine": OPTIONS["engine"], "dtype": "float32", **sizes, **options})


@cache
def tokens_of(name):
    return tuple(load_file(GOLDEN / name / "golden.safetensors")["input_ids"].tolist())


@cache
def full_pass(name, tokens):
    """The logits after tokens, in one enqueue of the reference engine into an empty cache."""
    with open_model(name, slots=1, width=S, engine="reference") as session:
        return session.prefill([tokens])[0]


@cache
def alone(name, prompt, params):
    """What a prompt generates in a session of the reference engine of its own, one step after another."""
    with open_model(name, slots=1, engine="reference") as session:
        return [event.token for event in session.generate([prompt], params)]


def prompts_of(name):
    whole = tokens_of(name)
    return [whole[:7], whole[3:5], whole[9:20]]


def params_of(counts, **options):
    return [SamplingParams(max_new_tokens=count, ignore_eos=True, **options) for count in counts]


def generated(stream):
    found = {}
    for event in stream:
        found.setdefault(event.index, []).append(event.token)
    return [found[index] for index in sorted(found)]


def check_slots(session, name):
    """Every slot goes on exactly from the tokens that it says it holds."""
    turn = tokens_of(name)[1:3]
    held = [session.tokens(slot) + session.pending_tokens(slot) for slot in range(session.cache.active_batch_size)]
    turns = [turn if len(tokens) + len(turn) <= S else () for tokens in held]
    for tokens, logits, new in zip(held, session.append(turns), turns, strict=True):
        if new:
            assert_close(logits, full_pass(name, (*tokens, *new)))


def states_of(session, slot):
    states = session.cache.states
    return [view.numpy()[slot] for kind in states.kinds for view in states.current(kind).layers]


@every_model
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_slots_that_end_keep_their_states_while_others_go_on(name, where):
    with open_model(name) as session:
        session = ahead(session) if where == "ahead" else session
        params = params_of([9, 4, 12])
        found = generated(session.generate(prompts_of(name), params))
        assert found == [alone(name, prompt, one) for prompt, one in zip(prompts_of(name), params, strict=True)]
        check_slots(session, name)


@every_model
@pytest.mark.parametrize("taken", [1, 3, 4, 8, 9, 10, 11])
def test_a_step_ahead_that_is_forgotten_leaves_no_trace(name, taken):
    with ahead(open_model(name)) as session:
        stream = session.generate(prompts_of(name), params_of([9, 3, 9]))
        for _ in range(taken):
            next(stream)
        check_slots(session, name)
        with pytest.raises(ClosedError, match="another call has changed the sequences"):
            next(stream)


@every_model
def test_a_step_ahead_is_forgotten_when_the_slots_move(name):
    """Requests of a queue end at different steps: slots are compacted between two steps."""
    with ahead(open_model(name, slots=2)) as session:
        whole = tokens_of(name)
        prompts, params = [whole[:7], whole[3:5], whole[9:20], whole[2:4]], params_of([6, 3, 9, 12])
        handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        while session.step():
            pass
        for handle, prompt, one in zip(handles, prompts, params, strict=True):
            assert list(handle.tokens) == alone(name, prompt, one)


@every_model
def test_states_after_the_last_token_of_each_slot(name):
    """Padding leaves no trace, and a slot that gets nothing keeps its states bit for bit."""
    with open_model(name) as session:
        session.prefill(prompts_of(name))
        before = states_of(session, 1)
        poison(session.cache)
        session.append([tokens_of(name)[:3], (), tokens_of(name)[:1]])
        for old, new in zip(before, states_of(session, 1), strict=True):
            np.testing.assert_array_equal(new, old)
        with open_model(name, slots=1, width=S) as other:
            other.prefill([session.tokens(0)])
            for mine, expected in zip(states_of(session, 0), states_of(other, 0), strict=True):
                assert_close(mine, expected)


@every_model
def test_rewind_is_exact_or_refused(name):
    with open_model(name) as session:
        list(session.generate(prompts_of(name), params_of([2, 2, 2])))
        before = cache_rows(session.cache), session.tokens(0), session.pending_tokens(0)
        with pytest.raises(ConfigError) as error:
            session.rewind(0, 3)
        assert str(error.value) == "rewind: recurrent states cannot go back to an earlier token. Restore captured ones, or clear_slot."
        assert (cache_rows(session.cache), session.tokens(0), session.pending_tokens(0)) == before
        session.rewind(0, len(session.tokens(0)))
        assert session.pending_tokens(0) == ()
        session.rewind(1, 0)
        assert session.tokens(1) == ()
        check_slots(session, name)


@every_model
def test_a_prompt_that_does_not_begin_with_what_its_slot_holds_is_run_whole(name):
    whole = tokens_of(name)
    with open_model(name, slots=2) as session:
        session.prefill([whole[:6], whole[4:9]])
        logits = session.prefill([whole[:9], whole[4:8]], reuse=True)
        assert session._batch.reused == [6, 0]
        for found, prompt in zip(logits, (whole[:9], whole[4:8]), strict=True):
            assert_close(found, full_pass(name, prompt))


@every_model
@pytest.mark.parametrize("queued", [False, True])
def test_the_prompt_cache_is_used_at_exact_positions(name, queued):
    whole = tokens_of(name)
    with open_model(name, slots=2, prompt_cache_bytes=1 << 20) as session:

        def answer(*prompts):
            params = params_of([3] * len(prompts))
            if not queued:
                return generated(session.generate(list(prompts), params))
            handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            while session.step():
                pass
            return [list(handle.tokens) for handle in handles]

        [first] = answer(whole[:9])
        reused = session.prompt_cache.reused_tokens
        assert answer(whole[:9]) == [first] == [alone(name, whole[:9], *params_of([3]))]
        assert session.prompt_cache.reused_tokens - reused == 8  # of 9: one is always run
        longer = (*whole[:9], *first, *whole[2:4])
        reused = session.prompt_cache.reused_tokens
        assert answer(longer, whole[:5]) == [alone(name, longer, *params_of([3])), alone(name, whole[:5], *params_of([3]))]
        assert session.prompt_cache.reused_tokens - reused == 11  # the last turn but its pending token; nothing for the shorter prompt
        assert answer(whole[:1]) == [alone(name, whole[:1], *params_of([3]))]


@every_model
def test_a_snapshot_goes_on_in_another_session(name, tmp_path):
    prompt = prompts_of(name)[2]
    [long] = params_of([9])
    with open_model(name) as session:
        list(session.generate(prompts_of(name), params_of([2, 2, 4])))
        session.save_snapshot(tmp_path / "saved.safetensors", slot=2)
    with open_model(name, slots=2, width=3) as session:
        session.prefill([tokens_of(name)[:5]])
        resumed = generated(session.resume(tmp_path / "saved.safetensors", max_new_tokens=5, ignore_eos=True))
        check_slots(session, name)
    assert resumed == [alone(name, prompt, long)[4:]]


@every_model
@pytest.mark.parametrize("counts", [(3, 1), (0, 1), (2, 1), (1, 0), (0, 0), None])
def test_drafts_that_are_accepted_in_part(name, counts):
    whole = tokens_of(name)
    with open_model(name, slots=2, max_logits_per_slot=4) as session:
        session.prefill([whole[:6], whole[4:9]])
        rows = [whole[10:13], whole[14:15]]
        logits = session.verify(rows)
        before = [session.tokens(slot) for slot in range(2)]
        for slot, row in enumerate(rows):
            for count in range(len(row)):
                assert_close(logits[slot, count], full_pass(name, (*before[slot], *row[: count + 1])))
        if counts is not None:
            session.accept(counts)
            kept = [(*held, *row[:count]) for held, row, count in zip(before, rows, counts, strict=True)]
            assert [session.tokens(slot) for slot in range(2)] == kept
        check_slots(session, name)


@every_model
def test_a_draft_whose_padding_has_no_room_is_refused(name):
    whole = tokens_of(name)
    with open_model(name, slots=2, max_logits_per_slot=4) as session:
        if session.cache.kv_config is None:
            pytest.skip("states have room for any number of tokens")
        session.prefill([whole[:22], whole[4:9]])
        before = cache_rows(session.cache)
        with pytest.raises(CapacityError, match="verify: a slot has no room for the padding of 4 tokens, and states cannot be set back"):
            session.verify([whole[:1], whole[:4]])
        assert cache_rows(session.cache) == before
        check_slots(session, name)


@every_model
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_fails_can_be_repeated(name, when, monkeypatch):
    whole = tokens_of(name)
    with open_model(name, slots=2) as session:
        session.prefill([whole[:6], whole[4:9]])
        enqueue = session.engine.enqueue

        def failing(stream):
            if when == "after":
                enqueue(stream)
            raise EngineError("planned")

        for call in (lambda: session.decode([1, 2]), lambda: session.append([whole[:2], whole[:5]])):
            with monkeypatch.context() as patch:
                patch.setattr(session.engine, "enqueue", failing)
                with pytest.raises(EngineError, match="planned"):
                    call()
            assert [session.tokens(slot) for slot in range(2)] == [whole[:6], whole[4:9]]
        check_slots(session, name)


@every_model
def test_a_step_whose_logits_fail_can_be_repeated(name, monkeypatch):
    """The commit came before the wait: the states of before it are still there."""
    whole = tokens_of(name)
    with open_model(name, slots=2) as session:
        session.prefill([whole[:6], whole[4:9]])
        with monkeypatch.context() as patch:
            patch.setattr(session._runner, "logits", lambda count: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.decode([1, 2])
        assert session.tokens(0) == whole[:6]
        check_slots(session, name)


@every_model
def test_a_call_of_several_steps_that_fails_drops_the_sequences(name, monkeypatch):
    whole = tokens_of(name)
    with open_model(name, slots=2) as session:
        session.prefill([whole[:6], whole[4:9]])
        with monkeypatch.context() as patch:
            fail_at(patch, session.engine, {2})
            with pytest.raises(EngineError, match="planned"):
                session.append([whole[:8], whole[:2]])
        assert session.cache.active_batch_size == 0
        with pytest.raises(ShapeError):
            session.decode([1, 2])
        assert_close(session.prefill([whole[:6]])[0], full_pass(name, whole[:6]))


def fail_at(patch, engine, numbers):
    """Let the enqueues of these numbers, from 1, fail."""
    enqueue, calls = engine.enqueue, []

    def failing(stream):
        calls.append(stream)
        if len(calls) in numbers:
            raise EngineError("planned")
        enqueue(stream)

    patch.setattr(engine, "enqueue", failing)


@every_model
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_requests_go_on_after_a_step_that_failed(name, where, monkeypatch):
    whole = tokens_of(name)
    prompts, params = [whole[:7], whole[3:5], whole[9:20]], params_of([6, 3, 4])
    with open_model(name, slots=2) as session:
        session = ahead(session) if where == "ahead" else session
        handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        fail_at(monkeypatch, session.engine, {2, 5, 9})
        failures = 0
        while not all(handle.finished for handle in handles):
            try:
                session.step()
            except EngineError:
                failures += 1
        assert 2 <= failures <= 3  # a step ahead that fails is not missed if it is forgotten
        for handle, prompt, one in zip(handles, prompts, params, strict=True):
            assert list(handle.tokens) == alone(name, prompt, one)


@every_model
def test_scores_are_those_of_the_logits(name):
    tokens = tokens_of(name)[:9]
    with open_model(name, slots=2, max_logits_per_slot=4) as session:
        scores = session.score([tokens, tokens[2:6]])
    for score, prompt in zip(scores, (tokens, tokens[2:6]), strict=True):
        for count in range(1, len(prompt)):
            logits = full_pass(name, prompt[:count]).astype(np.float64)
            expected = logits[prompt[count]] - np.log(np.exp(logits).sum())
            assert score.logprobs[count] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@every_model
def test_bytes(name):
    with open_model(name) as session:
        assert session.statistics.cache_bytes_live == 0
        session.prefill(prompts_of(name)[:2])
        kv, mamba = session.cache.kv_config, session.cache.mamba_config
        per_token = 0 if kv is None else sum(2 * layer.num_kv_heads * layer.head_dim * 4 for layer in kv.layers)
        assert session.statistics.cache_bytes_live == 9 * per_token + 2 * mamba.slot_nbytes
        assert session.statistics.cache_bytes_reserved == session.cache.nbytes


def test_a_picture_shows_the_layers_with_states():
    with open_model("lfm2") as session:
        session.prefill(prompts_of("lfm2")[:2])
        assert f"{session.cache.mamba_config.num_layers} layer" in session.plot().svg


def test_a_cache_with_one_buffer_of_states_is_refused():
    with open_model("lfm2", slots=1) as session:
        config = session.cache.config
        states = {name: getattr(config.mamba, name) for name in ("num_layers", "max_batch_size", "conv_dim", "conv_kernel", "conv_dtype")}
        one = HybridCacheConfig(layer_types=config.layer_types, kv=config.kv, mamba=type(config.mamba)(**states))
        with HybridCacheManager(one, memory=HostMemory()) as cache, pytest.raises(ConfigError) as error:
            Runner(session.engine, cache)
    assert str(error.value) == ("cache: expected two buffers of states, ping_pong=True, got one: a step that fails could not be repeated.")


def test_the_buffers_of_a_draft_that_runs_again_are_free_before_the_next_enqueue(monkeypatch):
    """Each enqueue reads its tokens from one buffer of the host, possibly after the call."""
    name = next(name for name in MODELS if "window" not in name)
    with open_model(name) as session:
        session.prefill(prompts_of(name))
        session.verify([[3, 4, 5], [5], [6, 7]])
        runner, calls = session._runner, []
        enqueue, synchronize = runner._enqueue, runner.synchronize
        monkeypatch.setattr(runner, "_enqueue", lambda chunk, parents=None: (calls.append("enqueue"), enqueue(chunk)))
        monkeypatch.setattr(runner, "synchronize", lambda: (calls.append("wait"), synchronize()))
        session.accept([2, 1, 1])
        assert calls
        assert calls == ["enqueue", "wait"] * (len(calls) // 2)


def test_a_draft_is_accepted_once():
    with open_model("lfm2", slots=1, max_logits_per_slot=4) as session:
        session.prefill([[5, 6, 7]])
        session.verify([[1, 2, 3]])
        session.accept([1])
        with raises(RangeError, "accept", "verify before it"):
            session.accept([1])


class Slots:
    """Random calls on a session beside lists of tokens: those that a slot holds, and what is not run yet."""

    def __init__(self, session, name, data):
        self.session, self.name, self.draw = session, name, data.draw
        self.held, self.pending = [], []

    def check(self):
        session = self.session
        assert [list(session.tokens(slot)) for slot in range(len(self.held))] == self.held
        assert [list(session.pending_tokens(slot)) for slot in range(len(self.held))] == self.pending
        assert session.cache.host_kv_cache_lengths == tuple(map(len, self.held))

    def row(self, most):
        start = self.draw(st.integers(0, 12))
        return list(tokens_of(self.name)[start : start + self.draw(st.integers(1, most))])

    def expect(self, logits):
        for tokens, found in zip(self.held, logits, strict=True):
            if not np.isnan(found).all():
                assert_close(found, full_pass(self.name, tuple(tokens)))

    def prefill(self):
        prompts = [self.row(9) for _ in range(self.draw(st.integers(1, 3)))]
        reuse = len(prompts) == len(self.held) and self.draw(st.booleans())
        if reuse:
            prompts = [(held + row)[:S] if self.draw(st.booleans()) else row for held, row in zip(self.held, prompts, strict=True)]
        logits = self.session.prefill(prompts, reuse=reuse)
        self.held, self.pending = prompts, [[] for _ in prompts]
        self.expect(logits)

    def append(self):
        turns = [self.row(4) if self.draw(st.booleans()) else [] for _ in self.held]
        new = [pending + turn if turn else [] for pending, turn in zip(self.pending, turns, strict=True)]
        if any(len(held) + len(row) > S for held, row in zip(self.held, new, strict=True)):
            with pytest.raises(CapacityError):
                self.session.append(turns)
            return
        logits = self.session.append(turns)
        self.held = [held + row for held, row in zip(self.held, new, strict=True)]
        self.pending = [[] if row else pending for row, pending in zip(new, self.pending, strict=True)]
        self.expect(logits)

    def decode(self):
        tokens = [self.row(1)[0] for _ in self.held]
        if not tokens or max(map(len, self.held)) == S:
            with pytest.raises((CapacityError, ShapeError)):
                self.session.decode(tokens)
            return
        logits = self.session.decode(tokens)
        self.held, self.pending = [[*held, token] for held, token in zip(self.held, tokens, strict=True)], [[] for _ in tokens]
        self.expect(logits)

    def verify(self):
        rows = [self.row(3) for _ in self.held]
        if not rows or max(map(len, self.held)) + 3 > S:
            return
        self.session.verify(rows)
        counts = [self.draw(st.integers(0, len(row))) for row in rows]
        self.session.accept(counts)
        self.held = [held + row[:count] for held, row, count in zip(self.held, rows, counts, strict=True)]
        self.pending = [[] if count else pending for count, pending in zip(counts, self.pending, strict=True)]

    def rewind(self):
        for slot in range(len(self.held)):
            length = self.draw(st.integers(0, len(self.held[slot])))
            if 0 < length < len(self.held[slot]):
                with pytest.raises(ConfigError, match="recurrent states cannot go back"):
                    self.session.rewind(slot, length)
            else:
                self.session.rewind(slot, length)
                self.held[slot], self.pending[slot] = self.held[slot][:length], []

    def generate(self):
        prompts, params = [self.row(5), self.row(5)], params_of([self.draw(st.integers(1, 5)), self.draw(st.integers(1, 5))])
        found = generated(self.session.generate(prompts, params))
        assert found == [alone(self.name, tuple(prompt), one) for prompt, one in zip(prompts, params, strict=True)]
        whole = [prompt + tokens for prompt, tokens in zip(prompts, found, strict=True)]
        self.held = [list(self.session.tokens(slot)) for slot in range(2)]
        self.pending = [tokens[len(held) :] for tokens, held in zip(whole, self.held, strict=True)]


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5"])
@settings(max_examples=6)
@given(data=st.data())
def test_random_programs(name, data):
    with open_model(name, max_logits_per_slot=4) as session:
        slots = Slots(session, name, data)
        for _ in range(data.draw(st.integers(2, 7))):
            poison(session.cache)
            getattr(slots, data.draw(st.sampled_from(["prefill", "append", "decode", "verify", "rewind", "generate"])))()
            slots.check()
