"""Prompts that begin alike and run at the same time: what is alike runs once, and each request gets the tokens that it gets alone."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.recording import poison
from tests.helpers.sessions import alone, drain, make, outcome, sampled
from tests.session.test_states import MODELS, alone as alone_with_states, open_model, params_of, tokens_of
from tests.sweeps import one_of_each_family
from trt_kvcache import SamplingParams
from trt_kvcache.errors import CapacityError
from trt_kvcache.sequences.slot_copy import SlotCopy
from trt_kvcache.session import shared_prompts

PROMPT = [1, 2, 3, 4, 0, 2, 1]


@pytest.fixture(autouse=True)
def _worth_from_two_tokens(monkeypatch):
    monkeypatch.setattr(shared_prompts, "WORTH_SHARING", 2)


def check(session, handles, prompts, params):
    """All requests end as they do alone."""
    while session.step():
        poison(session.cache)
    for handle, prompt, one in zip(handles, prompts, params, strict=True):
        assert outcome(handle) == alone(make(limit=session.max_sequence_length), prompt, one)


def test_equal_prompts_run_once():
    session = make(slots=3)
    params = [sampled(3, seed) for seed in range(3)]
    handles = [session.submit(PROMPT, one) for one in params]
    session.step()  # chunks of four tokens
    assert [handle.state for handle in handles] == ["prefilling"] * 3
    session.step()
    assert [len(handle.tokens) for handle in handles] == [1] * 3
    assert session.statistics.prefill_tokens == len(PROMPT)
    assert [handle.reused_tokens for handle in handles] == [0, len(PROMPT), len(PROMPT)]
    check(session, handles, [PROMPT] * 3, params)


def test_equal_prompts_around_a_longer_one():
    """The last one waits for the first; the longer one has a token where it has none."""
    session = make(slots=3)
    prompts, params = [PROMPT, [4, *PROMPT, 3], PROMPT], [sampled(3, seed) for seed in range(3)]
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    check(session, handles, prompts, params)
    assert [handle.reused_tokens for handle in handles] == [0, 0, len(PROMPT)]


def test_a_later_request_takes_what_a_running_one_holds():
    session = make(slots=2)
    params = [sampled(6), sampled(3, 4)]
    handles = [session.submit(PROMPT, params[0])]
    for _ in range(3):
        session.step()
    handles.append(session.submit(PROMPT, params[1]))
    session.step()
    assert session.statistics.prefill_tokens == len(PROMPT) + 1  # its last token, for its logits
    check(session, handles, [PROMPT] * 2, params)


def test_prompts_that_part_run_what_they_share_once():
    session = make(slots=3)
    prompts = [[*PROMPT, 3, 3], [*PROMPT, 4], PROMPT[:6]]
    params = [sampled(2, seed) for seed in range(3)]
    handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    check(session, handles, prompts, params)
    assert session.statistics.prefill_tokens == len(prompts[0]) + 1 + 1
    assert [handle.reused_tokens for handle in handles] == [0, 7, 5]


def test_few_tokens_are_run_again():
    session = make(slots=2)
    for prompt in ([1, 2, 3], [1, 3]):
        session.submit(prompt, max_new_tokens=1)
    drain(session)
    assert session.statistics.prefill_tokens == 5


@pytest.mark.parametrize("ended", [0, 1])
def test_a_request_goes_on_if_the_one_that_it_waits_for_is_cancelled(ended):
    session = make(slots=4)
    params = [sampled(3, seed) for seed in range(4)]
    handles = [session.submit(PROMPT, one) for one in params]
    session.step()
    handles[ended].cancel()
    ran = session.statistics.prefill_tokens
    check(session, [*handles[:ended], *handles[ended + 1 :]], [PROMPT] * 3, [*params[:ended], *params[ended + 1 :]])
    assert session.statistics.prefill_tokens - ran == (len(PROMPT) if ended == 0 else len(PROMPT) - ran)


def test_without_room_for_the_copy_prompts_are_run():
    session = make(slots=2)
    params = [sampled(3, seed) for seed in range(2)]
    handles = [session.submit(PROMPT, one) for one in params]

    def capture(*_, **__):
        raise CapacityError("memory: full.")

    with patch.object(SlotCopy, "capture", capture):
        check(session, handles, [PROMPT] * 2, params)
    assert session.statistics.prefill_tokens == 2 * len(PROMPT)


def test_slots_that_cannot_be_reached_alone_share_nothing():
    session = make(slots=3, limit=7)
    params = [sampled(2, seed) for seed in range(3)]
    handles = [session.submit(PROMPT, one) for one in params]
    check(session, handles, [PROMPT] * 3, params)
    assert session.statistics.prefill_tokens == 3 * len(PROMPT)


def test_a_step_that_fails_can_be_repeated():
    session = make(slots=3)
    params = [sampled(3, seed) for seed in range(3)]
    handles = [session.submit(PROMPT, one) for one in params]
    session.step()
    choose = handles[2]._queued.request.choose
    handles[2]._queued.request.choose = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        session.step()
    assert [handle.tokens for handle in handles] == [()] * 3
    assert [handle.reused_tokens for handle in handles] == [0] * 3
    handles[2]._queued.request.choose = choose
    check(session, handles, [PROMPT] * 3, params)
    assert [handle.reused_tokens for handle in handles] == [0, len(PROMPT), len(PROMPT)]


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 4), st.booleans(), st.sampled_from([0, 1 << 12]))
def test_random_arrivals_and_cancels(seed, slots, combined, reuse):
    random = np.random.default_rng(seed)
    session = make(slots=slots, combined=combined, reuse=reuse)
    handles, asked = [], []
    for what in [*random.choice(["submit", "step", "cancel", "prefill"], 30, p=[0.5, 0.4, 0.07, 0.03]), *["step"] * 40]:
        if what == "submit":
            rest = random.integers(0, 2, random.integers(0, 5)).tolist()
            asked.append(([*PROMPT[: int(random.integers(1, 8))], *rest], sampled(int(random.integers(1, 5)), int(random.integers(9)))))
            handles.append(session.submit(*asked[-1]))
        elif what == "cancel" and handles:
            handles[random.integers(len(handles))].cancel()
        elif what == "prefill":
            session.prefill([[1, 2]])  # another caller takes the slots
        elif what == "step":
            moved = session.step()
            poison(session.cache)
            assert moved or all(handle.finished for handle in handles)
    drain(session)
    for handle, (prompt, params) in zip(handles, asked, strict=True):
        tokens, text, reason = alone(make(), prompt, params)
        if handle.finish_reason == "cancelled":
            assert handle.tokens == tokens[: len(handle.tokens)]
        else:
            assert outcome(handle) == (tokens, text, reason)


@pytest.mark.parametrize("prompt_cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", one_of_each_family(MODELS))
def test_states_are_shared_where_prompts_part(name, prompt_cache_bytes):
    whole = tokens_of(name)
    prompts = [whole[:9], whole[:9], (*whole[:6], *whole[2:4]), whole[:9]]
    params = params_of([4, 3, 5, 2], temperature=0.8, seed=3)
    with open_model(name, slots=4, prompt_cache_bytes=prompt_cache_bytes) as session:
        handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        drain(session)
        assert [list(handle.tokens) for handle in handles] == [
            alone_with_states(name, prompt, one) for prompt, one in zip(prompts, params, strict=True)
        ]
        assert session.statistics.prefill_tokens == 9 + 2
        assert [handle.reused_tokens for handle in handles] == [0, 9, 6, 9]


@pytest.mark.parametrize("name", one_of_each_family(MODELS))
def test_the_prompt_cache_keeps_states_where_a_second_prompt_parts(name):
    whole = tokens_of(name)
    prompts = [(*whole[:8], first, *whole[3:5]) for first in (3, 4, 5)]
    [params] = params_of([3])
    with open_model(name, slots=1, prompt_cache_bytes=1 << 20) as session:
        reused = []
        for prompt in prompts:
            handle = session.submit(prompt, params)
            drain(session)
            assert list(handle.tokens) == alone_with_states(name, prompt, params)
            reused.append(handle.reused_tokens)
    assert reused == [0, 0, 8]


@pytest.mark.parametrize("last", [(), (3,)], ids=["equal", "not equal"])
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5"])
def test_states_that_were_copied_are_dropped_if_the_step_fails(name, held, last):
    whole = tokens_of(name)
    params = params_of([4, 3, 2])
    prompts = [whole[:9], whole[:9], (*whole[: 9 - len(last)], *last)]
    with open_model(name, slots=3, prompt_cache_bytes=1 << 20) as session:
        if held:
            list(session.generate([whole[: held + 1]], *params_of([1])))
        handles = [session.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        choose = handles[2]._queued.request.choose
        handles[2]._queued.request.choose = lambda *_, **__: 1 / 0
        with pytest.raises(ZeroDivisionError):
            drain(session)
        handles[2]._queued.request.choose = choose
        drain(session)
        assert [list(handle.tokens) for handle in handles] == [
            alone_with_states(name, prompt, one) for prompt, one in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5"])
def test_states_behind_the_shared_tokens_are_not_copied(name):
    whole = tokens_of(name)
    params = params_of([8, 3])
    with open_model(name, slots=2) as session:
        handles = [session.submit(whole[:9], params[0])]
        for _ in range(4):
            session.step()
        handles.append(session.submit(whole[:9], params[1]))
        drain(session)
        assert [list(handle.tokens) for handle in handles] == [alone_with_states(name, whole[:9], one) for one in params]
        assert handles[1].reused_tokens == 0


def test_a_scored_prompt_runs_alone():
    with open_model("llama", slots=3, max_logits_per_slot="all") as session:
        prompt = tokens_of("llama")[:9]
        handles = [session.submit(prompt, SamplingParams(max_new_tokens=2), prompt_logprobs=one) for one in (0, None, None)]
        drain(session)
        assert session.statistics.prefill_tokens == 18
        [score] = session.score([prompt])
        assert handles[0].prompt_score.logprobs[1:] == pytest.approx(score.logprobs[1:], rel=1e-5)
