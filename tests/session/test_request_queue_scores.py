"""Scores of prompts in the queue: those of ``score``, while other requests run and get what they get alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.sessions import alone, drain, make, outcome, refuse, sampled
from tests.session.every_logit import with_every_logit
from trt_kvcache import AsyncSession, InferenceSession
from trt_kvcache.errors import ConfigError, RangeError

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [7], [8, 9], [5, 5, 5, 5, 5, 5], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]


@pytest.mark.parametrize(("slots", "limit", "logits"), [(3, 16, 5), (1, 16, 2), (3, 13, 6), (8, 16, 4)])
@pytest.mark.parametrize("combined", [False, True])
def test_a_prompt_is_scored_while_others_run(slots: int, limit: int, logits: int, combined: bool) -> None:
    options = {"slots": slots, "limit": limit, "logits": logits, "combined": combined}
    with with_every_logit(**options) as session:
        wanted = [index % 2 == 0 for index in range(len(PROMPTS))]
        handles = [
            session.submit(prompt, sampled(3, seed=index), prompt_logprobs=2 if scored else None)
            for index, (prompt, scored) in enumerate(zip(PROMPTS, wanted, strict=True))
        ]
        drain(session)
    for index, (handle, prompt, scored) in enumerate(zip(handles, PROMPTS, wanted, strict=True)):
        with with_every_logit(**options) as fresh:
            assert outcome(handle) == alone(fresh, prompt, sampled(3, seed=index))
            assert handle.prompt_score == (fresh.score([prompt], top_logprobs=2)[0] if scored else None)


def test_no_most_likely_tokens_are_reported_if_none_are_asked_for() -> None:
    with with_every_logit() as session:
        handle = session.submit(PROMPTS[0], sampled(1), prompt_logprobs=0)
        drain(session)
        assert handle.prompt_score == session.score([PROMPTS[0]])[0]


def test_there_is_no_score_before_the_prompt_has_run() -> None:
    with with_every_logit() as session:
        handle = session.submit(PROMPTS[0], sampled(3), prompt_logprobs=0)
        seen = [handle.prompt_score]
        while handle.state in ("queued", "prefilling"):
            session.step()
            seen.append(handle.prompt_score)
    assert [score is None for score in seen] == [True, True, True, False]


def test_a_step_that_fails_scores_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    with with_every_logit() as session:
        handle = session.submit(PROMPTS[0], sampled(1), prompt_logprobs=1)
        session.step()
        with monkeypatch.context() as patch:
            patch.setattr(session._queue, "_choose_first", lambda *_: 1 / 0)
            session.step()
            with pytest.raises(ZeroDivisionError):
                session.step()
        drain(session)
        assert handle.prompt_score == session.score([PROMPTS[0]], top_logprobs=1)[0]


def test_a_request_that_begins_again_is_scored_again() -> None:
    with with_every_logit() as session:
        handle = session.submit(PROMPTS[0], sampled(3), prompt_logprobs=1)
        for _ in range(4):
            session.step()
        session.prefill([[1, 2]])
        drain(session)
        assert handle.prompt_score == session.score([PROMPTS[0]], top_logprobs=1)[0]


def test_a_scored_prompt_takes_nothing_from_the_prompt_cache() -> None:
    options = {"engine": "reference", "max_logits_per_slot": "all", "prompt_cache_bytes": 1 << 20, "max_batch_size": 2}
    with InferenceSession.from_model("examples/tiny-llama", **options) as session:
        for prompt_logprobs in (None, 0, None):
            handle = session.submit(PROMPTS[0], sampled(1), prompt_logprobs=prompt_logprobs)
            drain(session)
            assert handle.reused_tokens == (0 if handle.index < 2 else len(PROMPTS[0]) - 1)
            assert (handle.prompt_score is None) == (handle.index != 1)


def test_an_engine_with_the_last_logits_only_is_refused() -> None:
    with make() as session:
        text = refuse(session, ConfigError, lambda: session.submit([1, 2], prompt_logprobs=0))
        assert "prompt_logprobs: expected an engine with the logits of 2 new tokens per slot or more" in text
        assert "prompt_logprobs" in refuse(session, RangeError, lambda: session.submit([1, 2], prompt_logprobs=-1))


def test_from_an_event_loop() -> None:
    async def main():
        async with AsyncSession(with_every_logit()) as served:
            request = await served.submit(PROMPTS[0], sampled(2), prompt_logprobs=1)
            first = await request.read(0)
            await request.wait()
            assert first + await request.read(len(first)) == list(request.events)
            assert await request.read(2) == []
            assert len(request.times) == 2
            assert sorted(request.times) == list(request.times)
            return request.handle.prompt_score

    with with_every_logit() as session:
        assert asyncio.run(main()) == session.score([PROMPTS[0]], top_logprobs=1)[0]
