"""What a session calls, in which order, and what is left when any one of the calls fails."""

import numpy as np
import pytest

from tests.helpers.interrupts import (
    ERRORS,
    LineTracer,
    before_or_after,
    calls_of,
    count_calls,
    decode_calls,
    first_or_last,
    journal,
    lengths,
    names,
    sequences,
    state,
)
from tests.helpers.recording import kv_config, recorded
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.engine.decoder_profiles import decoder_profiles
from trt_kvcache.errors import EngineError


def make(**options):
    return InferenceSession(*recorded(kv_config(**options)))


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
    stream = session._runner.stream
    assert [call for call in calls if call[0] in ("reset", "commit")] == [("reset", (0, 0), stream), ("commit", [3, 2], stream)]


def test_a_decode_step_allocates_nothing_and_calls_only_these():
    session = decoding()
    live, stream = session.cache.memory.live_nbytes, session._runner.stream
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
        return count_calls(lambda: session.decode([8, 9]))

    count(2)  # what is done once in a process
    assert count(2) == count(9)


def verifying(**options):
    """A session that has verified drafts."""
    profiles = decoder_profiles(max_batch_size=3, max_prefill_length=6, max_logits_per_slot=4)
    session = InferenceSession(*recorded(kv_config(**options), profiles=profiles, more_logits=True))
    session.prefill([[1, 2, 3], [4, 5]])
    session.verify([[6, 7, 8], [9]])
    return session


def test_the_verification_of_drafts_enqueues_once_and_commits_once():
    session = verifying()
    live, stream = session.cache.memory.live_nbytes, session._runner.stream
    for _ in range(3):
        session.accept([0, 1])
        calls = calls_of(session, lambda: session.verify([[6, 7, 8], [9]]))
        assert names(calls) == ["upload", "use_profile", "enqueue", "download", "synchronize"]
        assert calls_of(session, lambda: session.accept([1, 0])) == [("commit", (1, 0), stream)]
        session.verify([[6, 7, 8], [9]])
    assert session.cache.memory.live_nbytes == live


def test_the_verification_of_drafts_does_nothing_per_layer():
    def count(layers):
        session = verifying(layers=layers)
        session.engine._run = lambda: None
        return count_calls(lambda: session.verify([[6, 7, 8], [9]])) + count_calls(lambda: session.accept([2, 1]))

    count(2)  # what is done once in a process
    assert count(2) == count(9)


def test_chunks_are_enqueued_and_committed_one_after_another():
    session = make()
    calls = calls_of(session, lambda: session.prefill([[1] * 10, [2] * 5]))
    calls = [call for call in calls if call[0] in ("enqueue", "commit", "synchronize")]
    assert names(calls) == ["enqueue", "commit", "synchronize"] * 3
    assert [call[1] for call in calls[1::3]] == [[4, 4], [4, 1], [2, 0]]


def test_a_step_with_an_idle_slot_makes_the_same_calls():
    session = make()
    events = session.generate([[1, 2], [3]], at_most(1, 9))
    for _ in range(3):  # two first tokens, and the second one of slot 1
        next(events)
    assert names(calls_of(session, lambda: next(events))) == names(decode_calls(None))


def test_close_waits_for_the_stream_and_closes_each_once():
    engine, cache = recorded()
    closed = []
    session = InferenceSession(engine, cache, on_close=lambda: closed.append((engine.closed, cache.closed)))
    journal(session).take()
    session.close()
    session.close()
    assert journal(session).take() == [("synchronize", session._runner.stream)]
    assert (closed, engine.closed, cache.memory.live_nbytes) == ([(1, True)], 1, 0)


def test_close_releases_everything_even_if_the_wait_fails():
    engine, cache = recorded()
    closed = []
    session = InferenceSession(engine, cache, on_close=lambda: closed.append(1))
    journal(session).fail_at(0, EngineError("the device is gone"), after=False)
    with pytest.raises(EngineError, match="the device is gone"):
        session.close()
    assert (engine.closed, cache.closed, closed, cache.memory.live_nbytes) == (1, True, [1], 0)


STEPS = {
    "decode": lambda s: s.decode([8, 9, 10]),
    "append": lambda s: s.append([[8, 9, 10, 11, 12], [], [13]]),
    "rewind": lambda s: s.rewind(0, 1),
}

each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def in_the_middle():
    """A session with three sequences; slot 1 has a pending token."""
    session = make()
    list(session.generate([[1, 2], [4, 5, 8], [6]], max_new_tokens=1))
    session.append([[3], [], [7]])  # slot 1 keeps the token that was generated
    assert [len(session.pending_tokens(slot)) for slot in range(3)] == [0, 1, 0]
    return session


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


@each_step
def test_ctrl_c_at_any_line_does_all_of_a_step_or_nothing(step):
    """The interpreter raises KeyboardInterrupt between any two lines: here at the first or at the last visit of each."""
    calm = in_the_middle()
    visits = LineTracer(lambda: step(calm)).visits
    expected = step(in_the_middle())
    nothing, everything = sequences(in_the_middle()), sequences(calm)
    assert len(visits) > 20
    places = first_or_last(visits)
    undone = 0
    for line, visit in places:
        session = in_the_middle()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(lambda session=session: step(session), at=(line, visit))
        left = sequences(session)
        assert left in (nothing, everything), line
        if left == nothing:
            undone += 1
            np.testing.assert_array_equal(step(session), expected)
            left = sequences(session)
        assert left == everything
    assert undone > 0.8 * len(places)


@pytest.mark.parametrize("reuse", [0, 1])
def test_ctrl_c_at_any_line_of_a_prefill_keeps_the_chunks_that_were_run(reuse):
    prompts = [[1, 2, 3, 4, 5, 6, 7], [4, 5], [6, 7]]
    calm = in_the_middle()
    visits = LineTracer(lambda: calm.prefill(prompts, reuse=bool(reuse))).visits
    expected = make().prefill(prompts)
    assert len(visits) > 100
    seen = set()
    for line, visit in first_or_last(visits):
        session = in_the_middle()
        with pytest.raises(KeyboardInterrupt):
            LineTracer(lambda session=session: session.prefill(prompts, reuse=bool(reuse)), at=(line, visit))
        seen.add(tuple(lengths(session)))
        np.testing.assert_array_equal(session.prefill(prompts, reuse=True), expected)
        assert sequences(session) == sequences(calm)
    assert seen == ({(4, 3, 3), (2, 1, 1), (6, 2, 2), (7, 2, 2)} if reuse else {(4, 3, 3), (0, 0, 0), (4, 2, 2), (7, 2, 2)})


@before_or_after
def test_a_prefill_that_fails_keeps_the_chunks_that_were_run(after):
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]
    expected = make().prefill(prompts)
    for index in range(1000):
        session = make()
        session.prefill([[20, 21, 22], [19], [22]])
        journal(session).fail_at(index, KeyboardInterrupt(), after=after)
        try:
            session.prefill(prompts)
        except KeyboardInterrupt:
            held = [session.tokens(slot) for slot in range(len(lengths(session)))]
            assert held in ([(20, 21, 22), (19,), (22,)], [(), ()], [(1, 2, 3, 4), (7, 8)])
            np.testing.assert_array_equal(session.prefill(prompts, reuse=len(held) == 2), expected)
        assert [session.tokens(slot) for slot in (0, 1)] == [tuple(prompt) for prompt in prompts]
        if not journal(session).failed:
            break
    assert index > 12


@pytest.mark.parametrize(("prompt", "room"), [([1, 2, 3, 4, 5], 3), ([1], 1)], ids=["a full slot is idle", "an ended slot is idle"])
@before_or_after
def test_generate_can_be_continued_after_an_interrupt_at_any_call(prompt, room, after):
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
