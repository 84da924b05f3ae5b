"""``submit`` and ``step``: requests come and go at random, and each gets the tokens that it gets alone."""

import numpy as np
import pytest
from checkpoint.tokenizer_folders import byte_level_folder
from fakes import kv_config, poison, recorded
from hypothesis import given
from hypothesis import strategies as st
from test_session_order import ERRORS, before_or_after, journal, lengths

from trt_kvcache import InferenceSession, PromptCache, SamplingParams
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.engine import EngineProfile
from trt_kvcache.errors import ClosedError

S = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def make(*, tokenizer=None, profiles=None, reuse=0, **kv):
    engine, cache = recorded(kv_config(**kv), profiles=profiles)
    return InferenceSession(engine, cache, tokenizer=tokenizer, prompt_cache=PromptCache(cache, max_bytes=reuse))


def outcome(handle):
    return handle.tokens, handle.text, handle.finish_reason


def alone(session, prompt, params):
    events = list(session.generate([prompt], params))
    return tuple(event.token for event in events), "".join(event.text for event in events), events[-1].finish_reason


def drain(session):
    while moved := session.step():
        assert [handle.index for handle in moved] == sorted(handle.index for handle in moved)


def sampled(count, seed=0):
    return SamplingParams(max_new_tokens=count, temperature=1.5, seed=seed)


def random_params(random):
    return SamplingParams(max_new_tokens=int(random.integers(1, 9)), temperature=random.choice([0.0, 1.5]), seed=int(random.integers(9)))


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([S, 7]), st.booleans(), st.sampled_from([0, 1 << 12]))
def test_random_arrivals_and_cancels(seed, slots, limit, one_profile, reuse):
    random = np.random.default_rng(seed)
    profile = EngineProfile(name="any", min_batch=1, max_batch=slots, min_width=1, max_width=4)
    session = make(slots=slots, limit=limit, profiles=[profile] if one_profile else None, reuse=reuse)
    handles, asked, cancelled = [], [], set()
    program = [*random.choice(["submit", "step", "cancel", "prefill"], 30, p=[0.4, 0.5, 0.06, 0.04]), *["step"] * 20]
    for what in program:
        if what == "submit":
            asked.append((random.integers(0, 3, random.integers(1, limit + 1)), random_params(random)))
            handles.append(session.submit(*asked[-1]))
        elif what == "cancel" and handles:
            cancelled |= {handle.index for handle in random.choice(handles, 1) if handle.cancel()}
        elif what == "prefill":
            session.prefill([[1, 2]])  # somebody else takes the slots
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


def test_the_others_go_on_while_a_long_prompt_comes_in():
    session = make(slots=2)
    first = session.submit([1], max_new_tokens=5)
    session.step()
    second = session.submit(range(S), max_new_tokens=2)
    third = session.submit([3], max_new_tokens=1)
    seen = []
    while moved := session.step():
        seen.append(([handle.index for handle in moved], first.state, second.state, third.state))
    assert seen[0] == ([0, 1], "decoding", "prefilling", "queued")
    starts = [step.start for step in session.engine.steps if len(step.input_ids[0]) > 1]
    assert starts == ([[0], [4], [8], [12]])
    assert outcome(second) == alone(make(), range(S), SamplingParams())
    assert [handle.finish_reason for handle in (first, second, third)] == ["length"] * 3


def in_the_middle(tokenizer):
    """The next step drops slot 0, moves slot 2 there, admits one, runs a chunk of two prompts, and decodes one or two tokens."""
    session = make(slots=3, tokenizer=tokenizer)
    handles = [session.submit([1, 2], sampled(2)), session.submit([3, 4, 5, 6, 7, 8, 9], sampled(3, 1)), session.submit([4], sampled(5, 2))]
    handles.append(session.submit([6, 7, 8], sampled(4, 8)))
    session.step()
    session.step()
    assert [handle.state for handle in handles] == ["finished", "decoding", "decoding", "queued"]
    return session, handles


def seen(handles):
    return [(*outcome(handle), handle.state, handle.sampler) for handle in handles]


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@before_or_after
def test_a_failure_of_any_call_leaves_everything_and_the_step_can_be_repeated(tokenizer, after, error):
    calm, calm_handles = in_the_middle(tokenizer)
    calm.step()
    expected = seen(calm_handles)
    drain(calm)
    for index in range(100):
        session, handles = in_the_middle(tokenizer)
        before = seen(handles)
        journal(session).fail_at(index, error, after=after)
        try:
            session.step()
        except type(error):
            assert seen(handles) == before
            held = [session.tokens(slot) for slot in range(len(lengths(session)))]
            assert {(*handle.prompt, *handle.tokens[:-1]) for handle in handles[1:3]} <= set(held)
            session.step()
        assert seen(handles) == expected
        if not journal(session).failed:
            break
        poison(session.cache)
        drain(session)
        assert seen(handles) == seen(calm_handles)
    assert index > 10


def test_others_on_the_same_session():
    session = make()
    events = session.generate([[1, 2]], max_new_tokens=5)
    next(events)
    assert session.step() == []
    next(events)
    handle = session.submit([3], max_new_tokens=2)
    assert session.step() == [handle]
    with pytest.raises(ClosedError, match="another call has changed the sequences"):
        next(events)
    session.close()
    for call in (session.step, lambda: session.submit([1])):
        with pytest.raises(ClosedError, match="this InferenceSession is closed"):
            call()
