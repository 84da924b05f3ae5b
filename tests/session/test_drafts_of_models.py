"""Speculative decoding of models with states, windows and quantized K and V: the tokens are those without drafts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers.recording import Drafter, cache_rows, known_truth, poison
from tests.helpers.sessions import ahead
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS, fails
from tests.session.test_states import S, check_slots, generated, open_model, prompts_of, tokens_of
from trt_kvcache import InferenceSession, SamplingParams

#: Conv states, states without attention, states of the delta rule, and both kinds beside attention.
every_model = pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next-bias", "granitemoehybrid"])
every_quality = pytest.mark.parametrize("right", [0, 0.5, 1])


def params_of(*counts: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=count, seed=seed, ignore_eos=True, temperature=0.9) for seed, count in enumerate(counts or (9, 4, 12))
    ]


def drafter(name: str, prompts: Any, right: float, *counts: int) -> Drafter:
    with open_model(name) as plain:
        return Drafter(known_truth([*plain.generate(prompts, params_of(*counts))], prompts), right, seed=4)


@every_model
@every_quality
@pytest.mark.parametrize("where", ["host", "ahead"])
def test_generate_over_states(name: str, right: float, where: str) -> None:
    prompts = prompts_of(name)
    with open_model(name) as plain, open_model(name) as session:
        expected = generated(plain.generate(prompts, params_of()))
        session = ahead(session) if where == "ahead" else session
        assert generated(session.generate(prompts, params_of(), draft=drafter(name, prompts, right))) == expected
        assert [session.tokens(slot) for slot in range(3)] == [plain.tokens(slot) for slot in range(3)]
        assert [session.pending_tokens(slot) for slot in range(3)] == [plain.pending_tokens(slot) for slot in range(3)]
        assert session.statistics.draft_tokens
        check_slots(session, name)


@every_model
@every_quality
@pytest.mark.parametrize("taken", [1, 5, 8, 14])
def test_an_iterator_over_states_may_be_left_at_any_token(name: str, right: float, taken: int) -> None:
    prompts = prompts_of(name)
    with open_model(name) as session:
        stream = session.generate(prompts, params_of(), draft=drafter(name, prompts, right))
        seen = [*itertools.islice(stream, taken)]
        for index, prompt in enumerate(prompts):
            assert (*session.tokens(index), *session.pending_tokens(index)) == (
                *prompt,
                *(event.token for event in seen if event.index == index),
            )
        check_slots(session, name)


@every_model
@every_quality
def test_a_queue_over_states(name: str, right: float) -> None:
    prompts = prompts_of(name)
    with open_model(name) as plain, open_model(name, slots=2) as session:
        expected = generated(plain.generate(prompts, params_of()))
        draft = drafter(name, prompts, right)
        handles = [session.submit(prompt, one, draft=draft) for prompt, one in zip(prompts, params_of(), strict=True)]
        for number in itertools.count():
            if number in (2, 4):  # a step fails, and is repeated
                fails(session, session.step)
            if not session.step():
                break
            poison(session.cache)
        assert [list(handle.tokens) for handle in handles] == expected
        assert session.statistics.draft_tokens


@every_model
def test_states_after_the_accepted_part_of_a_draft(name: str) -> None:
    """A draft of which a part is accepted runs again: one enqueue more, and none if all of it is accepted."""
    [prompt, *_] = prompts_of(name)
    enqueues = {}
    for right in (0, 1):
        with open_model(name, slots=1) as session:
            enqueue, count = session.engine.enqueue, itertools.count()
            stream = session.generate([prompt], params_of(6), draft=drafter(name, [prompt], right, 6))
            next(stream)
            session.engine.enqueue = lambda stream, count=count, enqueue=enqueue: (next(count), enqueue(stream))  # type: ignore[method-assign]
            next(stream)
            enqueues[right] = next(count)
    assert enqueues == {0: 2, 1: 1}


@every_quality
@pytest.mark.parametrize("name", ["gemma2-bias", "llama-linear", "granitemoehybrid-bias"])
@pytest.mark.parametrize("kv", [{}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}], ids=["plain", "int8", "fp8"])
def test_windows_and_quantized_rows(name: str, kv: dict[str, Any], right: float) -> None:
    options = {
        "engine": OPTIONS["engine"],
        "dtype": "float32",
        "max_batch_size": 3,
        "max_sequence_length": S,
        "max_prefill_length": 6,
        **kv,
    }
    prompts = prompts_of(name)
    with (
        InferenceSession.from_model(GOLDEN / name, **options) as plain,
        InferenceSession.from_model(GOLDEN / name, **options) as session,
    ):
        events = [*plain.generate(prompts, params_of())]
        draft = Drafter(known_truth(events, prompts), right, seed=4)
        assert generated(session.generate(prompts, params_of(), draft=draft)) == generated(events)
        assert [session.tokens(slot) for slot in range(3)] == [plain.tokens(slot) for slot in range(3)]


@every_quality
def test_a_conversation_goes_on_from_what_the_cache_has(right: float) -> None:
    name = "llama-linear"
    prompts = prompts_of(name)[:1]
    with open_model(name, slots=1, prompt_cache_bytes=1 << 20) as plain, open_model(name, slots=1, prompt_cache_bytes=1 << 20) as session:
        events = [*plain.generate(prompts, params_of(9))]
        assert generated(session.generate(prompts, params_of(9), draft=Drafter(known_truth(events, prompts), right))) == generated(events)
        turn = [*prompts[0], *generated(events)[0], *tokens_of(name)[:2]]
        for one in (plain, session):
            assert len([*one.generate([turn], max_new_tokens=3, ignore_eos=True, reuse=True)]) == 3
        assert (plain.statistics.reused_tokens, plain.statistics.prefill_tokens) == (
            session.statistics.reused_tokens,
            session.statistics.prefill_tokens,
        )
        assert len(cache_rows(session.cache)) == len(cache_rows(plain.cache))
