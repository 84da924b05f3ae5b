"""What a session calls, in which order, and what is left when any one of the calls fails."""

import sys
from pathlib import Path

import numpy as np
import pytest

import trt_kvcache
from tests.helpers.fakes import VOCAB, cache_rows, kv_config, recorded
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import EngineError

PACKAGE = str(Path(trt_kvcache.__file__).parent)


def make(**options):
    return InferenceSession(*recorded(kv_config(**options)))


def journal(session):
    return session.engine.memory.journal


def names(calls):
    return [call[0] for call in calls]


def calls_of(session, call):
    journal(session).take()
    call()
    return journal(session).take()


def decode_calls(stream):
    """All that a decode step of two slots calls."""
    enqueue = [("upload", (2, 1), stream), ("use_profile", 1), ("enqueue", stream), ("commit", 1, stream)]
    return [*enqueue, ("download", (2, VOCAB), stream), ("synchronize", stream)]


def at_most(*counts):
    return [SamplingParams(max_new_tokens=count) for count in counts]


def decoding(**options):
    """A session that has run a prefill and a decode step."""
    session = make(**options)
    session.prefill([[1, 2, 3], [4, 5]])
    session.decode([6, 7])
    return session


def test_the_order_of_a_prefill():
    session = make()
    calls = calls_of(session, lambda: session.prefill([[1, 2, 3], [4, 5]]))
    order = [name for name in names(calls) if name not in ("bind", "set_input_shape")]
    assert order == ["reset", "upload", "upload", "use_profile", "enqueue", "commit", "download", "synchronize"]
    stream = session._steps.stream
    assert [call for call in calls if call[0] in ("reset", "commit")] == [("reset", (0, 0), stream), ("commit", [3, 2], stream)]


def test_a_decode_step_allocates_nothing_and_calls_only_these():
    session = decoding()
    live, stream = session.cache.memory.live_nbytes, session._steps.stream
    for _ in range(3):
        assert calls_of(session, lambda: session.decode([8, 9])) == decode_calls(stream)
    assert session.cache.memory.live_nbytes == live


def test_shapes_are_set_when_the_batch_changes_and_nothing_is_bound_again():
    session = make()
    session.prefill([[1], [2], [3]])
    session.decode([4, 5, 6])
    session.prefill([[1, 2], [3]])
    calls = names(calls_of(session, lambda: session.decode([4, 5])))
    assert (calls.count("bind"), calls.count("set_input_shape")) == (0, 3 + 2 * session.cache.num_layers)


def test_a_decode_step_does_nothing_per_layer():
    def count(layers):
        session = decoding(layers=layers)
        session.engine._run = lambda: None
        events = []
        sys.setprofile(lambda frame, event, arg: events.append(event) if event in ("call", "c_call") else None)
        try:
            session.decode([8, 9])
        finally:
            sys.setprofile(None)
        return len(events)

    assert count(2) == count(9)


def test_close_waits_for_the_stream_closes_each_once_and_goes_on_after_one_that_fails():
    for fails in (False, True):
        engine, cache = recorded()
        closed = []
        session = InferenceSession(engine, cache, on_close=lambda: closed.append((engine.closed, cache.closed)))  # noqa: B023
        journal(session).take()
        if fails:
            journal(session).fail_at(0, EngineError("the device is gone"), after=False)
            with pytest.raises(EngineError, match="the device is gone"):
                session.close()
        session.close()
        session.close()
        assert journal(session).take() == [("synchronize", session._steps.stream)]
        assert (closed, engine.closed, cache.memory.live_nbytes) == ([(1, True)], 1, 0)


STEPS = {
    "decode": lambda s: s.decode([8, 9, 10]),
    "append": lambda s: s.append([[8, 9, 10, 11, 12], [], [13]]),
    "rewind": lambda s: s.rewind(0, 1),
}
ERRORS = {"exception": EngineError("the engine said no"), "interrupt": KeyboardInterrupt(), "exit": GeneratorExit()}
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
before_or_after = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def in_the_middle():
    """A session with three sequences; slot 1 has a pending token."""
    session = make()
    session.prefill([[1, 2, 3], [4, 5], [6]])
    session.decode([7, 7, 7])
    session._batch.record_token(1, 20, None)
    return session


def lengths(session):
    """The lengths by tokens, which those of host and device must agree with."""
    held = [len(session.tokens(slot)) for slot in range(session.cache.active_batch_size)]
    assert held == list(session.cache.host_kv_cache_lengths) == session.cache.kv_cache_lengths.numpy().tolist()
    return held


def sequences(session):
    """What a step that failed must leave: lengths on host and device, tokens, rows, which memory is held."""
    slots = range(len(lengths(session)))
    tokens = [(session.tokens(slot), session.pending_tokens(slot)) for slot in slots]
    return tokens, cache_rows(session.cache), session.cache.memory.live_nbytes


def state(session):
    """The sequences, and the statistics, which may have counted a step that was interrupted between two lines."""
    return sequences(session), session.statistics.decode_steps, session.statistics.decode_tokens


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@before_or_after
@each_step
def test_a_failure_of_any_call_leaves_everything_and_the_step_can_be_repeated(step, after, error):
    calm = in_the_middle()
    expected = step(calm)
    for index in range(1000):
        session = in_the_middle()
        before = state(session)
        journal(session).fail_at(index, error, after=after)
        try:
            step(session)
        except type(error):
            assert state(session) == before, index
            np.testing.assert_array_equal(step(session), expected)
        assert state(session) == state(calm)
        if not journal(session).failed:
            break
    assert index >= (1 if expected is None else 6)


class LineTracer:
    """Counts the visits of every line of the package in a call, or raises KeyboardInterrupt at one of them."""

    def __init__(self, call, at=None):
        self.visits = {}
        self._at = at
        before = sys.gettrace()
        sys.settrace(lambda frame, event, arg: self._line if frame.f_code.co_filename.startswith(PACKAGE) else None)
        try:
            call()
        finally:
            sys.settrace(before)

    def _line(self, frame, event, arg):
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            visit = self.visits.get(line, 0)
            self.visits[line] = visit + 1
            if self._at == (line, visit):
                self._at = None  # one interrupt; the clean-up after it is left alone
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@each_step
def test_ctrl_c_at_any_line_of_the_package(step, which):
    """The interpreter raises KeyboardInterrupt between any two lines. Either nothing was done, or all of it."""
    calm = in_the_middle()
    visits = LineTracer(lambda: step(calm)).visits
    expected = step(in_the_middle())
    nothing, everything = sequences(in_the_middle()), sequences(calm)
    assert len(visits) > 20
    undone = 0
    for line, count in visits.items():
        session = in_the_middle()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(lambda session=session: step(session), at=(line, range(count)[which]))
        assert sequences(session) in (nothing, everything), line
        if sequences(session) == nothing:
            undone += 1
            np.testing.assert_array_equal(step(session), expected)
        assert sequences(session) == everything
    assert undone > 0.8 * len(visits)


@pytest.mark.parametrize("reuse", [0, 1])
def test_ctrl_c_at_any_line_of_a_prefill_keeps_the_chunks_that_were_run(reuse):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [4, 5], [6, 7]]
    calm = in_the_middle()
    visits = LineTracer(lambda: calm.prefill(prompts, reuse=bool(reuse))).visits
    expected = make().prefill(prompts)
    assert len(visits) > 100
    seen = set()
    for line, count in visits.items():
        for visit in {0, count - 1}:
            session = in_the_middle()
            with pytest.raises(KeyboardInterrupt):
                LineTracer(lambda session=session: session.prefill(prompts, reuse=bool(reuse)), at=(line, visit))
            seen.add(tuple(lengths(session)))
            np.testing.assert_array_equal(session.prefill(prompts, reuse=True), expected)
            assert sequences(session) == sequences(calm)
    assert seen == ({(4, 3, 2), (3, 1, 1), (7, 2, 2)} if reuse else {(4, 3, 2), (0, 0, 0), (4, 2, 2), (7, 2, 2)})


@pytest.mark.parametrize(("prompt", "room"), [([1, 2, 3, 4, 5], 3), ([1], 1)])
@before_or_after
def test_generate_interrupted_at_any_call(prompt, room, after):
    """After any interrupt, what was handed out is cached or pending, and going on from there gives the same tokens."""

    def run(session, seen, prompts, params):
        for event in session.generate(prompts, params):
            seen[event.index].append(event.token)

    expected = [[], []]
    run(make(limit=7), expected, [prompt, [6]], at_most(room, 6))
    assert [len(tokens) for tokens in expected] == [room, 6]
    for index in range(1000):
        session, seen = make(limit=7), [[], []]
        journal(session).fail_at(index, KeyboardInterrupt(), after=after)
        try:
            run(session, seen, [prompt, [6]], at_most(room, 6))
        except KeyboardInterrupt:
            if seen[0]:  # beyond the prefill
                rows = [[*session.tokens(slot), *session.pending_tokens(slot)] for slot in (0, 1)]
                assert rows == [[*prompt, *seen[0]], [6, *seen[1]]]
                lengths(session)
                run(session, seen[1:], rows[1:], at_most(6 - len(seen[1])))
                assert seen[1] == expected[1]
        else:
            break
    assert seen == expected
    assert index > 30
