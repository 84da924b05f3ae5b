"""What a session calls, in which order, and what is left when any one of the calls fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB, Journal, RecordingCache, RecordingEngine, RecordingMemory, cache_rows, kv_config, logits_after

import trt_kvcache
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import EngineError

PACKAGE = str(Path(trt_kvcache.__file__).parent)


def make(**options: Any) -> InferenceSession:
    memory = RecordingMemory(Journal())
    kv = kv_config(**options)
    return InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory))


def journal(session):
    return session.engine.memory.journal


def names(calls):
    return [call[0] for call in calls]


def state(session):
    """Everything that a step which failed must leave: lengths on host and device, tokens, rows, which memory is held."""
    cache = session.cache
    slots = range(cache.active_batch_size)
    return {
        "lengths": cache.host_kv_cache_lengths,
        "device": cache.kv_cache_lengths.numpy().tolist(),
        "tokens": [session.tokens(slot) for slot in slots],
        "pending": [session.pending_tokens(slot) for slot in slots],
        "rows": cache_rows(cache),
        "memory": cache.memory.live_nbytes,
        "statistics": (session.statistics.decode_steps, session.statistics.decode_tokens),
    }


class TestOrder:
    def test_the_first_prefill(self):
        session = make()
        journal(session).take()
        session.prefill([[1, 2, 3], [4, 5]])
        calls = journal(session).take()
        order = [name for name in names(calls) if name not in ("bind", "set_input_shape")]
        assert order == ["reset", "upload", "upload", "use_profile", "enqueue", "commit", "download", "synchronize"]
        assert [call for call in calls if call[0] in ("reset", "commit")] == [
            ("reset", (0, 0), session._steps.stream),
            ("commit", [3, 2], session._steps.stream),
        ]

    def test_a_decode_step_after_a_decode_step(self):
        session = make()
        session.prefill([[1, 2, 3], [4, 5]])
        session.decode([6, 7])
        journal(session).take()
        session.decode([8, 9])
        stream = session._steps.stream
        assert journal(session).take() == [
            ("upload", (2, 1), stream),
            ("use_profile", 1),
            ("enqueue", stream),
            ("commit", 1, stream),
            ("download", (2, VOCAB), stream),
            ("synchronize", stream),
        ]

    def test_chunks_are_enqueued_and_committed_one_after_another(self):
        session = make()
        journal(session).take()
        session.prefill([[1] * 10, [2] * 5])
        calls = [call for call in journal(session).take() if call[0] in ("enqueue", "commit", "synchronize")]
        assert names(calls) == ["enqueue", "commit", "synchronize"] * 3
        assert [call[1] for call in calls[1::3]] == [[4, 4], [4, 1], [2]] or [call[1] for call in calls[1::3]] == [[4, 4], [4, 1], [2, 0]]

    def test_shapes_are_set_when_the_batch_changes_and_nothing_is_bound_again(self):
        session = make()
        session.prefill([[1], [2], [3]])
        session.decode([4, 5, 6])
        session.prefill([[1, 2], [3]])
        journal(session).take()
        session.decode([4, 5])
        calls = names(journal(session).take())
        assert "bind" not in calls
        assert calls.count("set_input_shape") == 3 + 2 * session.cache.num_layers
        session.decode([4, 5])
        assert "set_input_shape" not in names(journal(session).take())

    def test_a_step_in_which_one_rides_along(self):
        session = make()
        events = session.generate([[1, 2], [3]], [_params(1), _params(9)])
        for _ in range(3):  # two first tokens, and the second one of slot 1
            next(events)
        journal(session).take()
        next(events)
        assert names(journal(session).take()) == ["upload", "use_profile", "enqueue", "commit", "download", "synchronize"]

    def test_a_decode_step_does_nothing_per_layer(self):
        def calls_of(layers):
            session = make(layers=layers)
            session.prefill([[1, 2, 3], [4, 5]])
            session.decode([6, 7])
            session.engine._run = lambda: None
            count = 0

            def tracer(frame, event, arg):
                nonlocal count
                count += event in ("call", "c_call")

            sys.setprofile(tracer)
            try:
                session.decode([8, 9])
            finally:
                sys.setprofile(None)
            return count

        assert calls_of(2) == calls_of(9)

    def test_a_decode_step_allocates_nothing(self):
        session = make()
        session.prefill([[1, 2, 3], [4, 5]])
        live = session.cache.memory.live_nbytes
        journal(session).take()
        for token in range(4):
            session.decode([token, token])
        calls = names(journal(session).take())
        assert {"allocate", "staging"}.isdisjoint(calls)
        assert session.cache.memory.live_nbytes == live

    def test_close_waits_for_the_stream_and_closes_each_once(self):
        memory = RecordingMemory(Journal())
        kv = kv_config()
        engine, cache = RecordingEngine(kv, memory), RecordingCache(kv, memory=memory)
        closed = []
        session = InferenceSession(engine, cache, on_close=lambda: closed.append((engine.closed, cache.closed)))
        memory.journal.take()
        session.close()
        session.close()
        assert memory.journal.take() == [("synchronize", session._steps.stream)]
        assert closed == [(1, True)]
        assert engine.closed == 1
        assert memory.live_nbytes == 0

    def test_close_goes_on_after_one_that_fails(self):
        memory = RecordingMemory(Journal())
        kv = kv_config()
        closed = []
        session = InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory), on_close=lambda: closed.append(1))
        memory.journal.fail_at(0, EngineError("the device is gone"), after=False)
        with pytest.raises(EngineError, match="the device is gone"):
            session.close()
        assert (session.engine.closed, session.cache.closed, closed, memory.live_nbytes) == (1, True, [1], 0)


def _params(max_new_tokens):
    return SamplingParams(max_new_tokens=max_new_tokens)


def decode(session):
    return session.decode([8, 9, 10])


def append(session):
    return session.append([[8, 9, 10, 11, 12], [], [13]])


def rewind(session):
    return session.rewind(0, 1)


def sequences(session):
    """The state without the statistics, which may have counted a step that was undone."""
    return {name: value for name, value in state(session).items() if name != "statistics"}


STEPS = {"decode": decode, "append": append, "rewind": rewind}
ERRORS = {"exception": EngineError("the engine said no"), "interrupt": KeyboardInterrupt(), "exit": GeneratorExit()}


def in_the_middle(limit=16):
    """A session with three sequences; slot 1 has a pending token."""
    session = make(limit=limit)
    session.prefill([[1, 2, 3], [4, 5], [6]])
    session.decode([7, 7, 7])
    session._sequences.pending[1] = [20]
    journal(session).take()
    return session


class TestFailures:
    @pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
    def test_a_failure_of_any_call_leaves_everything_and_the_step_can_be_repeated(self, step, after, error):
        calm = in_the_middle()
        expected = step(calm)
        for index in range(1000):
            session = in_the_middle()
            before = state(session)
            journal(session).fail_at(index, error, after=after)
            try:
                step(session)
            except type(error):
                assert state(session) == before, names(journal(session).take())
                np.testing.assert_array_equal(step(session), expected)
            assert state(session) == state(calm)
            if not journal(session).failed:
                break
        assert index >= (1 if step is rewind else 6)

    @pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
    @pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
    def test_ctrl_c_at_any_line_of_the_package(self, step, which):
        """The interpreter raises KeyboardInterrupt between any two lines. Either nothing was done, or all of it."""
        calm = in_the_middle()
        lines = LineTracer()
        lines.run(lambda: step(calm))
        expected = step(in_the_middle())
        nothing, everything = sequences(in_the_middle()), sequences(calm)
        assert len(lines.visits) > 20
        undone = 0
        for line, visits in lines.visits.items():
            session = in_the_middle()
            with pytest.raises(KeyboardInterrupt):
                LineTracer(at=(line, range(visits)[which])).run(lambda session=session: step(session))
            assert sequences(session) in (nothing, everything), line
            if sequences(session) == nothing:
                undone += 1
                np.testing.assert_array_equal(step(session), expected)
            assert sequences(session) == everything
        assert undone > 0.8 * len(lines.visits)

    @pytest.mark.parametrize("reuse", [False, True])
    def test_ctrl_c_at_any_line_of_a_prefill(self, reuse):
        prompts = [[1, 2, 3, 4, 5, 6, 7], [4, 5], [6, 7]]
        lines = LineTracer()
        calm = in_the_middle()
        lines.run(lambda: calm.prefill(prompts, reuse=reuse))
        expected = make().prefill(prompts)
        assert len(lines.visits) > 100
        for line in lines.visits:
            session = in_the_middle()
            with pytest.raises(KeyboardInterrupt):
                LineTracer(at=(line, 0)).run(lambda session=session: session.prefill(prompts, reuse=reuse))
            held = [session.tokens(slot) for slot in range(3)]
            assert tuple(map(len, held)) == session.cache.host_kv_cache_lengths == tuple(session.cache.kv_cache_lengths.numpy())
            np.testing.assert_array_equal(session.prefill(prompts, reuse=True), expected)
            assert sequences(session) == sequences(calm)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_a_prefill_that_fails_keeps_the_chunks_that_were_run(self, after):
        prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]
        expected = make().prefill(prompts)
        for index in range(1000):
            session = make()
            session.prefill([[20, 21, 22], [19], [22]])
            journal(session).fail_at(index, KeyboardInterrupt(), after=after)
            try:
                session.prefill(prompts)
            except KeyboardInterrupt:
                held = [session.tokens(slot) for slot in range(session.cache.active_batch_size)]
                assert tuple(map(len, held)) == session.cache.host_kv_cache_lengths
                assert session.cache.kv_cache_lengths.numpy().tolist() == list(map(len, held))
                assert held in ([(20, 21, 22), (19,), (22,)], [(), ()], [(1, 2, 3, 4), (7, 8)])
                np.testing.assert_array_equal(session.prefill(prompts, reuse=len(held) == 2), expected)
            assert [session.tokens(slot) for slot in (0, 1)] == [tuple(prompt) for prompt in prompts]
            if not journal(session).failed:
                break
        assert index > 12

    @pytest.mark.parametrize("full", [True, False], ids=["a full slot rides along", "an ended slot rides along"])
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    def test_generate_interrupted_at_any_call(self, full, after):
        """After any interrupt, what was handed out is cached or pending, and going on from there gives the same tokens."""
        prompts = [[1, 2, 3, 4, 5] if full else [1], [6]]

        def params(length):
            return [_params(3 if full else 1), _params(length)]

        whole = list(make(limit=7).generate(prompts, params(6)))
        expected = [[event.token for event in whole if event.index == slot] for slot in (0, 1)]
        assert [len(tokens) for tokens in expected] == [3 if full else 1, 6]
        for index in range(1000):
            session = make(limit=7)
            events = session.generate(prompts, params(6))
            seen = [[], []]
            journal(session).fail_at(index, KeyboardInterrupt(), after=after)
            try:
                for event in events:
                    seen[event.index].append(event.token)
            except KeyboardInterrupt:
                if not seen[0]:  # still in the prefill
                    continue
                for slot in (0, 1):
                    assert session.tokens(slot) + session.pending_tokens(slot) == (*prompts[slot], *seen[slot])
                    assert len(session.tokens(slot)) == session.cache.host_kv_cache_lengths[slot]
                left = [_params(6 - len(seen[1]))]
                row = [*session.tokens(1), *session.pending_tokens(1)]
                again = list(session.generate([row], left))
                assert seen[1] + [event.token for event in again] == expected[1]
                continue
            assert seen == expected
            break
        assert index > 30


class LineTracer:
    """Counts the visits of every line of the package in a call, or raises KeyboardInterrupt at one of them."""

    def __init__(self, at: tuple[tuple[str, int], int] | None = None) -> None:
        self.visits: dict[tuple[str, int], int] = {}
        self._at = at

    def run(self, call: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            visit = self.visits.get(line, 0)
            self.visits[line] = visit + 1
            if self._at == (line, visit):
                self._at = None  # one interrupt; the clean-up after it is left alone
                raise KeyboardInterrupt
        return self._line


def test_the_fake_engine_answers_to_the_tokens_it_was_given():
    session = make()
    np.testing.assert_array_equal(session.prefill([[1, 2, 3, 4, 5], [6]]), [logits_after([1, 2, 3, 4, 5]), logits_after([6])])
    np.testing.assert_array_equal(session.decode([7, 8]), [logits_after([1, 2, 3, 4, 5, 7]), logits_after([6, 8])])
