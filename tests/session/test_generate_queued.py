"""``generate`` with more prompts than slots: they take turns."""

from __future__ import annotations

import pytest

from tests.helpers.recording import two_profiles
from tests.helpers.sessions import alone, by_prompt, continuation, drain, make, refuse
from trt_kvcache import SamplingParams
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import BindingError, CapacityError, ClosedError, ShapeError

PROMPTS = [[1, 2, 3], [4], [5, 6], [7], [8, 9, 10, 11, 12], [13], [14, 15], [16], [17]]


@pytest.mark.parametrize(("count", "slots"), [(3, 2), (9, 8), (9, 1), (5, 3)])
def test_each_prompt_gets_what_it_gets_alone(count, slots):
    params = [SamplingParams(max_new_tokens=2 + 3 * index % 5, temperature=1.5, seed=index) for index in range(count)]
    session = make(slots=slots)
    events = list(session.generate(PROMPTS[:count], params))
    found = by_prompt(events)
    expected = [alone(make(slots=1), prompt, one) for prompt, one in zip(PROMPTS, params, strict=False)]
    assert [(tuple(tokens), text, reason) for tokens, text, reason in found] == expected
    assert session.cache.active_batch_size == 0


def test_tokens_come_step_by_step_in_the_order_of_the_prompts():
    params = [SamplingParams(max_new_tokens=count) for count in (2, 4, 1, 2)]
    events = make(slots=2).generate([[1], [2], [3], [4]], params)
    assert [event.index for event in events] == [0, 1, 0, 1, 1, 2, 1, 3, 3]


def test_work_is_done_as_the_tokens_are_read():
    session = make(slots=2)
    events = session.generate([[1], [2], [3]], max_new_tokens=2)
    assert session.engine.steps == []
    next(events)
    assert len(session.engine.steps) == 1


def test_the_session_may_be_closed_after_the_last_token():
    session = make(slots=2)
    for number, _ in enumerate(session.generate([[1], [2], [3]], max_new_tokens=2), start=1):
        if number == 6:
            session.close()


@pytest.mark.parametrize("read", [1, 2, 5])
def test_the_iterator_ends_when_another_call_changes_the_sequences(read):
    session = make(slots=2)
    events = session.generate([[1], [2], [3]], max_new_tokens=3)
    for _ in range(read):
        next(events)
    session.prefill([[1]])
    text = refuse(session, ClosedError, lambda: next(events))
    assert text == "this iterator cannot continue: another call has changed the sequences since. Call generate again."


def test_submitted_requests_continue_afterwards():
    session = make(slots=2)
    handle = session.submit([1, 2], max_new_tokens=6)
    session.step()
    assert len(list(session.generate([[1], [2], [3]], max_new_tokens=2))) == 6
    drain(session)
    assert list(handle.tokens) == continuation([1, 2], 6)


def test_what_is_refused_is_refused_at_once():
    session = make(slots=2)
    refuse(session, CapacityError, lambda: session.generate([[1], [2], [3] * 99]))
    refuse(session, ShapeError, lambda: session.generate([[1], [2], []]))
    session.prefill([[1], [2]])
    for option in ("append", "reuse"):
        refuse(session, ShapeError, lambda option=option: session.generate([[1], [2], [3]], **{option: True}))
    text = refuse(session, ShapeError, lambda: session.prefill([[1], [2], [3]]))
    assert text == "prompts: expected 1 to max_batch_size=2 of them, got 3."


def test_an_engine_that_does_not_take_every_number_of_slots_is_refused_at_once():
    fixed = [EngineProfile(name=one.name, min_batch=2, max_batch=2, min_width=1, max_width=one.max_width) for one in two_profiles(2, 4)]
    session = make(slots=2, profiles=fixed)
    refuse(session, BindingError, lambda: session.generate([[1], [2], [3]]))


def test_in_words():
    session = make(slots=2)
    events = session.generate([[1], [2], [3]], max_new_tokens=2)
    assert repr(events) == "TokenStream(requests=3, finished=0, tokens=0)"
    for _ in range(4):
        next(events)
    assert repr(events) == "TokenStream(requests=3, finished=2, tokens=4)"
