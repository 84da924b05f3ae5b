"""``RequestHandle``: what a caller sees of a submitted prompt."""

from __future__ import annotations

import pytest

from tests.helpers.sessions import alone, continuation, drain, make, outcome
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.checkpoint import Tokenizer


@pytest.fixture
def session() -> InferenceSession:
    """A session of two slots, whose engine takes four tokens per call."""
    return make(slots=2)


def test_a_submitted_request_is_queued(session: InferenceSession) -> None:
    handle = session.submit([1, 2])
    assert (handle.state, handle.tokens, handle.text, handle.finish_reason, handle.finished) == ("queued", (), "", None, False)
    assert session.engine.steps == []


def test_handles_are_numbered(session: InferenceSession) -> None:
    assert [session.submit([1]).index for _ in range(3)] == [0, 1, 2]


def test_the_prompt_is_kept(session: InferenceSession) -> None:
    prompt = [1, 2]
    handle = session.submit(prompt)
    prompt.append(3)
    assert handle.prompt == (1, 2)


def test_states_of_a_request(session: InferenceSession) -> None:
    handle = session.submit([1] * 6, max_new_tokens=2)
    states = [handle.state]
    while not handle.finished:
        session.step()
        states.append(handle.state)
    assert states == ["queued", "prefilling", "decoding", "finished"]


def test_tokens_are_those_of_the_model(session: InferenceSession) -> None:
    handle = session.submit([1, 2], max_new_tokens=3)
    drain(session)
    assert handle.tokens == tuple(continuation([1, 2], 3))


def test_the_reason_to_finish(session: InferenceSession) -> None:
    by_length = session.submit([1, 2], max_new_tokens=3)
    by_token = session.submit([1, 2], stop_token_ids=continuation([1, 2], 2)[-1:])
    drain(session)
    assert (by_length.finish_reason, by_token.finish_reason) == ("length", "stop")


def test_the_text_is_what_is_certain(tokenizer: Tokenizer) -> None:
    session = make(tokenizer=tokenizer, limit=32)
    handle = session.submit("see", max_new_tokens=12)
    drain(session)
    assert handle.text == tokenizer.decode(list(handle.tokens))


def test_seed_and_counter_of_the_sampler(session: InferenceSession) -> None:
    handle = session.submit([1], temperature=1.5, seed=7, max_new_tokens=5)
    session.step()
    session.step()
    assert handle.sampler == (7, 2)


def test_a_handle_in_words(session: InferenceSession) -> None:
    handle = session.submit([1, 2], max_new_tokens=3)
    session.step()
    assert repr(handle) == "RequestHandle(index=0, state='decoding', tokens=1)"


def test_a_handle_shows_what_is_for_callers(session: InferenceSession) -> None:
    shown = {name for name in dir(session.submit([1])) if not name.startswith("_")}
    said = {"finish_reason", "finished", "index", "prompt", "prompt_score", "reused_tokens", "sampler", "seed", "started", "state"}
    assert shown == {"accepted_tokens", "cancel", "draft_tokens", "events", "text", "tokens"} | said


def test_the_seed_that_was_drawn_gives_the_same_tokens_again(session: InferenceSession) -> None:
    first = session.submit([1, 2], temperature=3.0, max_new_tokens=6)
    again = session.submit([1, 2], temperature=3.0, max_new_tokens=6, seed=first.seed)
    drain(session)
    assert first.tokens == again.tokens
    assert repr(first) == f"RequestHandle(index=0, state='finished', tokens=6, seed={first.seed})"


def test_events_are_the_tokens_with_text_and_index(tokenizer: Tokenizer) -> None:
    session = make(tokenizer=tokenizer, limit=32)
    session.submit("tea", max_new_tokens=2)
    handle = session.submit("see", max_new_tokens=12)
    drain(session)
    assert [event.token for event in handle.events] == list(handle.tokens)
    assert "".join(event.text for event in handle.events) == handle.text
    assert {event.index for event in handle.events} == {1}
    assert [event.finish_reason for event in handle.events] == [None] * 11 + ["length"]


@pytest.mark.parametrize("steps", range(7), ids=["queued", "prefilling", "prefilling too", "one", "two", "three", "finished"])
def test_a_request_can_be_cancelled_in_any_state(steps):
    session = make(slots=2)
    kept, handle = session.submit([1], max_new_tokens=6), session.submit([2] * 9, max_new_tokens=4)
    for _ in range(steps):
        session.step()
    state, tokens = handle.state, handle.tokens
    assert (state, len(tokens)) == (["queued", "prefilling", "prefilling", *["decoding"] * 3, "finished"][steps], max(0, steps - 2))
    assert handle.cancel() is (steps < 6)
    assert handle.cancel() is False
    drain(session)
    assert (handle.state, handle.tokens, handle.finish_reason) == ("finished", tokens, "length" if steps == 6 else "cancelled")
    assert outcome(kept) == alone(make(), [1], SamplingParams(max_new_tokens=6))
    assert session.cache.active_batch_size == 0
