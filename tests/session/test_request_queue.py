"""``submit`` and ``step``: requests come and go at random, and each gets the tokens that it gets alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.interrupts import ERRORS, LineTracer, before_or_after, calls_of, count_calls, decode_calls, journal, lengths
from tests.helpers.models import write_model
from tests.helpers.recording import VOCAB, poison
from tests.helpers.sessions import alone, damage_logits, drain, make, outcome, sampled
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import BindingError, CapacityError, ClosedError, ConfigError, EngineError, RangeError, ShapeError

S = 16


def random_params(random):
    return SamplingParams(max_new_tokens=int(random.integers(1, 9)), temperature=random.choice([0.0, 1.5]), seed=int(random.integers(9)))


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([S, 7]), st.booleans(), st.booleans(), st.sampled_from([0, 1 << 12]))
def test_random_arrivals_and_cancels(seed, slots, limit, combined, one_profile, reuse):
    random = np.random.default_rng(seed)
    profile = EngineProfile(name="any", min_batch=1, max_batch=slots, min_width=1, max_width=4)
    session = make(slots=slots, limit=limit, combined=combined, profiles=[profile] if one_profile else None, reuse=reuse)
    handles, asked, cancelled = [], [], set()
    program = [*random.choice(["submit", "step", "cancel", "prefill"], 30, p=[0.4, 0.5, 0.06, 0.04]), *["step"] * 20]
    for what in program:
        if what == "submit":
            asked.append((random.integers(0, 3, random.integers(1, limit + 1)), random_params(random)))
            handles.append(session.submit(*asked[-1]))
        elif what == "cancel" and handles:
            cancelled |= {handle.index for handle in random.choice(handles, 1) if handle.cancel()}
        elif what == "prefill":
            session.prefill([[1, 2]])  # another caller takes the slots
        elif what == "step":
            counts = [len(handle.tokens) for handle in handles]
            moved = session.step()
            poison(session.cache)
            assert moved or all(handle.finished for handle in handles)
            assert all(len(handle.tokens) - count in (0, 1) for handle, count in zip(handles, counts, strict=True))
            states = [handle.state for handle in handles if handle.state != "finished"]
            assert "queued" not in states or set(states[states.index("queued") :]) == {"queued"}, "first in, first out"
    drain(session)
    lonely = make(limit=limit)
    for handle, (prompt, params) in zip(handles, asked, strict=True):
        tokens, text, reason = alone(lonely, prompt, params)
        if handle.index in cancelled:
            assert (handle.tokens, handle.finish_reason) == (tokens[: len(handle.tokens)], "cancelled")
        else:
            assert outcome(handle) == (tokens, text, reason)


def test_the_reference_engine_gives_each_request_the_tokens_it_gets_alone(tmp_path):
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    options: dict[str, Any] = {"engine": "reference", "dtype": "float32", "max_sequence_length": 32, "max_prefill_length": 5}
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [3], [4, 5, 6], [9, 8, 7, 6, 5, 4], [1] * 30]
    with InferenceSession.from_model(model, **options, max_batch_size=3) as session:
        handles = [session.submit(prompt, max_new_tokens=4 + index, ignore_eos=True) for index, prompt in enumerate(prompts)]
        drain(session)
        assert session.cache.active_batch_size == 0
        for index, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
            assert outcome(handle) == alone(session, prompt, SamplingParams(max_new_tokens=4 + index, ignore_eos=True))


def test_one_slot_of_a_combined_cache_serves_one_request_after_another():
    session = make(slots=1, combined=True)
    handles = [session.submit([1, 2, token], max_new_tokens=3) for token in (4, 5)]
    drain(session)
    assert [outcome(handle) for handle in handles] == [alone(make(), [1, 2, token], SamplingParams(max_new_tokens=3)) for token in (4, 5)]


@pytest.mark.parametrize("limit", [S, 7], ids=["aligned", "not aligned"])
def test_other_requests_continue_while_a_long_prompt_is_prefilled(limit):
    session = make(slots=2, limit=limit)
    first = session.submit([1], max_new_tokens=5)
    session.step()
    second = session.submit(range(limit), max_new_tokens=2)
    third = session.submit([3], max_new_tokens=1)
    seen = []
    while moved := session.step():
        seen.append(([handle.index for handle in moved], first.state, second.state, third.state))
    assert seen[0] == ([0, 1], "decoding", "prefilling", "queued")
    starts = [step.start for step in session.engine.steps if len(step.input_ids[0]) > 1]
    assert starts == ([[0], [4], [8], [12]] if limit == S else [[1, 0], [2, 4]])
    assert outcome(second) == alone(make(limit=limit), range(limit), SamplingParams())
    assert [handle.finish_reason for handle in (first, second, third)] == ["length"] * 3


def test_a_prompt_that_fills_its_slot_is_not_delayed_by_later_requests():
    session = make(slots=3, limit=7)
    full = session.submit(range(7), max_new_tokens=1)
    others = [session.submit([1] * int(length), max_new_tokens=1) for length in "324346646544644633225324256643"]
    for _ in range(6):
        session.step()
    assert full.finished
    assert not others[-1].finished


class TestChunkedPrefill:
    @pytest.mark.parametrize(("chunk", "widths"), [(1, [1] * 9), (2, [2, 2, 2, 2, 1]), (3, [3, 3, 3]), (99, [4, 4, 1])])
    def test_a_prompt_runs_in_smaller_chunks_beside_requests_that_decode(self, chunk, widths):
        session = make(slots=2, prefill_chunk=chunk)
        first = session.submit([1], max_new_tokens=14)
        session.step()
        second = session.submit(range(9), max_new_tokens=2)
        held = [0]
        while second.state != "decoding":
            tokens = len(first.tokens)
            session.step()
            assert len(first.tokens) == tokens + 1
            held.append(len(session.tokens(1)))
        assert np.diff(held).tolist() == widths
        drain(session)
        assert outcome(second) == alone(make(), range(9), SamplingParams(max_new_tokens=2))

    def test_the_oldest_prompt_comes_first_and_short_rows_share_the_tokens_of_a_step(self):
        session = make(slots=4, prefill_chunk=4)
        session.submit([1], max_new_tokens=14)
        session.step()
        for prompt in (range(9), [5], range(2, 8)):
            session.submit(prompt, max_new_tokens=6)
        held = []
        for _ in range(5):
            session.step()
            held.append([len(session.tokens(slot)) for slot in (1, 2, 3)])
        # The last token of the first prompt has the first one of the second beside it: two slots, a power of two.
        assert held == [[4, 0, 0], [8, 0, 0], [9, 1, 0], [10, 2, 4], [11, 3, 6]]

    def test_a_prompt_in_an_earlier_slot_does_not_overtake_an_older_one(self):
        session = make(slots=4, prefill_chunk=2)
        ends, _ = session.submit([1], max_new_tokens=2), session.submit([2], max_new_tokens=14)
        session.step()
        old, new = session.submit(range(9), max_new_tokens=2), session.submit(range(9), max_new_tokens=2)
        while old.state != "decoding":
            session.step()
        assert ends.finished
        assert session._queue.running[0] is new  # moved into the slot of the first one
        assert new.state == "prefilling"

    def test_prompts_that_run_alone_have_wide_chunks(self):
        session = make(slots=2, prefill_chunk=1)
        handles = [session.submit(range(4), max_new_tokens=2) for _ in range(2)]
        session.step()
        assert [handle.state for handle in handles] == ["decoding"] * 2

    @pytest.mark.parametrize("chunk", [0, -1, 1.5, True, None])
    def test_a_chunk_that_is_no_positive_number_is_refused(self, chunk):
        with pytest.raises(RangeError, match="prefill_chunk"):
            make(prefill_chunk=chunk)


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([(), [1, 2, 4], [1, 2, 3, 4]]), st.sampled_from([(), [1, 4]]))
def test_chunks_of_prompts_change_no_token(seed, chunk, buckets, coarse):
    random = np.random.default_rng(seed)
    session = make(slots=3, prefill_chunk=chunk)
    session.engine.width_buckets, session.engine.coarse_width_buckets = buckets, coarse
    asked = [(random.integers(0, 3, random.integers(1, S + 1)), random_params(random)) for _ in range(8)]
    handles = []
    for prompt, params in asked:
        handles.append(session.submit(prompt, params))
        for _ in range(random.integers(0, 3)):
            session.step()
            poison(session.cache)
    drain(session)
    lonely = make()
    assert [outcome(handle) for handle in handles] == [alone(lonely, prompt, params) for prompt, params in asked]


class TestCalls:
    def test_a_decode_step_makes_the_same_calls_as_decode(self):
        session = make(slots=3)
        handles = [session.submit([1, token], sampled(9, token)) for token in (2, 3)]
        session.step()
        session.step()
        stream, moved = session._runner.stream, []
        assert calls_of(session, lambda: moved.extend(session.step())) == decode_calls(stream)
        assert moved == handles
        assert [handle.sampler for handle in handles] == [(2, 3), (3, 3)]
        assert [session.pending_tokens(slot) for slot in (0, 1)] == [handle.tokens[-1:] for handle in handles]

    def test_a_decode_step_does_nothing_per_layer(self):
        def count(layers):
            session = make(layers=layers)
            for prompt in ([1, 2, 3], [4, 5]):
                session.submit(prompt)
            session.step()
            session.step()
            session.engine._run = lambda: None
            return count_calls(session.step)

        count(2)  # what is done once in a process
        assert count(2) == count(9)

    def test_a_new_prompt_is_prefilled_over_views_from_its_slot_that_are_made_once(self):
        session = make(slots=3)
        session.submit([1, 1], max_new_tokens=12)
        session.step()
        for _ in range(3):
            for token in (2, 3):  # in slot 1, then in slot 2; they end together
                session.submit([token] * 2, max_new_tokens=5 - token)
                session.step()
            session.step()
            assert [session.tokens(slot)[0] for slot in range(3)] == [1, 2, 3]
        steps = [step for step in session.engine.steps if step.profile == "prefill"]
        assert [(step.input_ids, step.start) for step in steps] == [([[token] * 2], [0]) for token in (1, *[2, 3] * 3)]
        names = [name for name in steps[0].bound if "cache" in name and "start" not in name]
        assert len(names) == 8
        for name in names:
            assert steps[0].bound[name].ptr < steps[1].bound[name].ptr < steps[2].bound[name].ptr
            assert len({id(step.bound[name]) for step in steps}) == 3
        assert session.cache.lengths.tensor.ptr not in [step.bound["kvcache_start_index"].ptr for step in steps[1:]]

    def test_compaction_moves_only_the_last_slots(self):
        session = make(slots=4)
        handles = [session.submit([token], max_new_tokens=9) for token in range(4)]
        session.step()
        handles[1].cancel()
        session.step()
        assert [session.tokens(slot)[0] for slot in range(3)] == [0, 3, 2]

    def test_prompts_with_a_common_prefix_share_it(self):
        session = make(slots=2, reuse=1 << 20)
        for _ in range(2):
            session.submit([1, 2, 3, 4, 5, 6], max_new_tokens=9)
            session.step()
            session.step()
        assert [step.start for step in session.engine.steps] == [[0], [4], [5], [6, 6], [7, 6]]
        assert session.statistics.reused_tokens == 5


def in_the_middle(tokenizer, limit=S):
    """The next step drops slot 0, moves slot 2 there, admits one, runs a chunk of two prompts, and decodes one or two tokens."""
    session = make(slots=3, limit=limit, tokenizer=tokenizer)
    handles = [session.submit([1, 2], sampled(2)), session.submit([3, 4, 5, 6, 7, 8, 9], sampled(3, 1)), session.submit([4], sampled(5, 2))]
    handles.append(session.submit([6, 7, 8], sampled(4, 8)))
    session.step()
    session.step()
    assert [handle.state for handle in handles] == ["finished", "decoding", "decoding", "queued"]
    return session, handles


def seen(handles):
    return [(*outcome(handle), handle.state, handle.sampler) for handle in handles]


class TestFailures:
    @pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
    @before_or_after
    @pytest.mark.parametrize("limit", [S, 11], ids=["aligned", "not aligned"])
    def test_a_failure_of_any_call_leaves_everything_and_the_step_can_be_repeated(self, tokenizer, limit, after, error):
        calm, calm_handles = in_the_middle(tokenizer, limit)
        enqueued = len(calm.engine.steps)
        calm.step()
        enqueued = len(calm.engine.steps) - enqueued
        expected = seen(calm_handles)
        drain(calm)
        for index in range(100):
            session, handles = in_the_middle(tokenizer, limit)
            before = seen(handles)
            journal(session).fail_at(index, error, after=after)
            try:
                session.step()
            except type(error):
                assert seen(handles) == before
                held = [session.tokens(slot) for slot in range(len(lengths(session)))]
                assert {(*handle.prompt, *handle.tokens[:-1]) for handle in handles[1:3]} <= set(held)
                count = len(session.engine.steps)
                session.step()
                assert len(session.engine.steps) - count == enqueued, "nothing is run that had been run"
            assert seen(handles) == expected
            if not journal(session).failed:
                break
            poison(session.cache)
            drain(session)
            assert seen(handles) == seen(calm_handles)
        assert index > 10

    def test_ctrl_c_at_any_line_of_the_queue_loses_nothing(self, tokenizer):
        calm, calm_handles = in_the_middle(tokenizer)
        mine = ("session/batch.py", "request")
        visits = {line: count for line, count in LineTracer(calm.step).visits.items() if any(part in line[0] for part in mine)}
        drain(calm)
        assert len(visits) > 80
        for number, (line, count) in enumerate(visits.items()):  # at its first visit, at the last of the next
            session, handles = in_the_middle(tokenizer)
            with pytest.raises(KeyboardInterrupt):
                LineTracer(session.step, at=(line, range(count)[-(number % 2)]))
            drain(session)
            assert seen(handles) == seen(calm_handles), line

    def test_logits_that_are_not_finite_leave_every_request_as_it_was(self):
        session = make()
        good, bad = (session.submit([token], max_new_tokens=3, temperature=1.5) for token in (1, 2))
        seed, _ = good.sampler
        mend = damage_logits(session, 1)
        for _ in range(2):
            with pytest.raises(EngineError, match="expected finite numbers"):
                session.step()
            assert (good.tokens, good.sampler, bad.state) == ((), (seed, 0), "queued")
        bad.cancel()
        mend()
        drain(session)
        assert outcome(good) == alone(make(), [1], sampled(3, seed))


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "text"),
    [
        ([], {}, ShapeError, "prompts[0]: expected at least one token, got none."),
        (5, {}, ShapeError, "prompts[0]: expected a sequence of token ids, got int."),
        ([1, VOCAB], {}, RangeError, f"prompts[0][1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
        ("text", {}, ConfigError, "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
        ([1] * 17, {}, CapacityError, "prompt 0 has 17 tokens; that exceeds max_sequence_length=16. Nothing was changed."),
        ([1], {"stop": "."}, ConfigError, "stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids."),
        ([1], {"max_new_tokens": 0}, RangeError, "SamplingParams.max_new_tokens: expected"),
        ([1], {"params": [SamplingParams()] * 2}, ShapeError, "params: expected SamplingParams, or 1 of them, one per prompt."),
    ],
    ids=str,
)
def test_prompts_and_options_that_are_refused(prompt, options, kind, text):
    session = make()
    with pytest.raises(kind) as error:
        session.submit(prompt, **options)
    assert str(error.value).startswith(text)
    assert (session.step(), session.submit([1]).index) == ([], 0)


def test_an_engine_of_a_fixed_batch_is_refused():
    session = make(profiles=[EngineProfile(name="fixed", min_batch=3, max_batch=3, min_width=1, max_width=4)])
    with pytest.raises(BindingError, match="no optimisation profile takes 1 slots of 1 new tokens"):
        session.submit([1])
    assert session.step() == []


def test_requests_wait_while_generate_has_the_slots():
    session = make()
    events = session.generate([[1, 2]], max_new_tokens=5)
    next(events)
    assert session.step() == []
    next(events)


def test_a_step_with_a_request_takes_the_slots_from_generate():
    session = make()
    events = session.generate([[1, 2]], max_new_tokens=5)
    next(events)
    handle = session.submit([3], max_new_tokens=2)
    assert session.step() == [handle]
    with pytest.raises(ClosedError, match="another call has changed the sequences"):
        next(events)


def test_lengths_that_were_changed_outside_the_session_are_refused():
    session = make()
    session.submit([3], max_new_tokens=2)
    session.step()
    session.cache.commit_sequence_length(1, stream=session.cache.memory.create_stream())
    with pytest.raises(RangeError, match="cache lengths: expected"):
        session.step()


def test_a_request_survives_a_prefill_that_takes_its_slot():
    session = make()
    handle = session.submit([3], max_new_tokens=2)
    session.step()
    session.prefill([[1]])
    drain(session)
    assert outcome(handle) == alone(make(), [3], SamplingParams(max_new_tokens=2))


@pytest.mark.parametrize("call", [lambda session: session.step(), lambda session: session.submit([1])], ids=["step", "submit"])
def test_a_closed_session_is_refused(call):
    session = make()
    session.close()
    with pytest.raises(ClosedError, match="this InferenceSession is closed"):
        call(session)
