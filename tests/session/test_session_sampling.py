"""Sampling options through a session: each request its own, whatever else is in the batch and however its tokens came into the cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.recording import VOCAB, logits_after
from tests.helpers.sessions import by_prompt, continuation, drain, make, refuse
from tests.session.reference_sessions import LONG, tokens
from trt_kvcache import SamplingParams
from trt_kvcache.errors import ProcessorError, RangeError

PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.4, "frequency_penalty": 0.7}
#: Eight requests, none like another.
EIGHT = [
    SamplingParams(max_new_tokens=9, **PENALTIES),
    SamplingParams(max_new_tokens=5, temperature=1.5, seed=3, repetition_penalty=0.6),
    SamplingParams(max_new_tokens=7, frequency_penalty=9.0),
    SamplingParams(max_new_tokens=8, presence_penalty=-30.0),
    SamplingParams(max_new_tokens=6, logit_bias={3: 5.0, 4: 5.0}, logprobs=2),
    SamplingParams(
        max_new_tokens=9, temperature=2.0, seed=4, logits_processors=[lambda seen, logits: logits - 3.0 * np.eye(VOCAB)[seen[-1]]]
    ),
    SamplingParams(max_new_tokens=4),
    SamplingParams(max_new_tokens=9, temperature=0.7, seed=1, top_k=9, **PENALTIES),
]
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11], [12], [13, 14], [15, 1, 15], [16]]


def alone(prompt, params):
    return by_prompt(make(slots=1, limit=32).generate(prompt, params))[0]


def penalised(prompt, count, params, *, earlier=()):
    """The greedy tokens after a prompt, computed without the package; ``earlier`` ones were generated before."""
    held, generated = list(prompt), list(earlier)
    for _ in range(count):
        logits = np.array(logits_after([*held, *generated]), np.float32)
        for token in {*held, *generated}:
            penalty = np.float32(params["repetition_penalty"])
            logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
        for token in generated:
            logits[token] -= np.float32(params["frequency_penalty"])
        for token in set(generated):
            logits[token] -= np.float32(params["presence_penalty"])
        generated.append(int(np.argmax(logits)))
    return generated[len(earlier) :]


def test_eight_requests_in_a_batch_get_what_they_get_alone():
    found = by_prompt(make(slots=8, limit=32).generate(PROMPTS, EIGHT))
    assert found == [alone(prompt, params) for prompt, params in zip(PROMPTS, EIGHT, strict=True)]
    assert found[0][0] == penalised(PROMPTS[0], 9, PENALTIES) != continuation(PROMPTS[0], 9)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("reuse", [0, 1 << 20], ids=["", "with a prompt cache"])
def test_queued_requests_get_what_they_get_alone(slots, reuse):
    session = make(slots=slots, limit=32, reuse=reuse)
    handles = [session.submit(prompt, params) for prompt, params in zip(PROMPTS * 2, EIGHT * 2, strict=True)]
    cancelled = session.submit([1, 2], EIGHT[0])
    for _ in range(4):
        session.step()
    cancelled.cancel()
    session.prefill([[9, 9]])  # takes the slots away: what had begun is run again
    drain(session)
    for handle, prompt, params in zip(handles, PROMPTS * 2, EIGHT * 2, strict=True):
        assert (list(handle.tokens), handle.text, handle.finish_reason) == alone(prompt, params)
    assert [len(event.top_logprobs) for event in handles[4].events] == [2] * 6


def test_a_next_turn_counts_the_whole_conversation_as_its_prompt():
    session = make(limit=32)
    first = by_prompt(session.generate([[1, 2], [3]], max_new_tokens=3))
    second = by_prompt(session.generate([[4, 5], [6]], max_new_tokens=6, append=True, **PENALTIES))
    for (before, _, _), (after, _, _), prompt, turn in zip(first, second, [[1, 2], [3]], [[4, 5], [6]], strict=True):
        assert after == penalised([*prompt, *before, *turn], 6, PENALTIES)


@pytest.mark.parametrize("read", range(1, 8))
@pytest.mark.parametrize("again", [False, True], ids=["", "loaded and saved again"])
def test_a_resumed_request_counts_what_it_has_generated_before(opened, tmp_path, read, again):
    options = {**PENALTIES, "temperature": 0.8, "ignore_eos": True, "logit_bias": {7: 3.0, 8: 3.0}}
    session = opened()
    whole = tokens(session.generate([[5, 6], LONG], max_new_tokens=8, seed=3, **options), 1)
    events = session.generate([[5, 6], LONG], max_new_tokens=8, seed=3, **options)
    for _ in range(2 * read):
        next(events)
    snapshot = session.save_snapshot(tmp_path / "a.kv", 1)
    assert snapshot.sampler.generated == read
    if again:
        other = opened()
        other.load_snapshots(tmp_path / "a.kv")
        assert other.save_snapshot(tmp_path / "a.kv").sampler == snapshot.sampler
    assert tokens(opened().resume(tmp_path / "a.kv", max_new_tokens=8 - read, **options)) == whole[read:]


def test_what_a_caller_appends_was_not_generated(opened, tmp_path):
    session = opened()
    list(session.generate([LONG], max_new_tokens=3, ignore_eos=True))
    assert session.save_snapshot(tmp_path / "a.kv").sampler.generated == 3
    session.rewind(0, len(LONG) + 1)
    assert session.save_snapshot(tmp_path / "a.kv").sampler.generated == 1
    session.append([[3, 4]])
    assert session.save_snapshot(tmp_path / "a.kv").sampler.generated == 0


class FailsAt:
    """A processor that fails once, at a call that is so many calls away."""

    def __init__(self, call):
        self.until = call

    def __call__(self, seen, logits):
        self.until -= 1
        if self.until == -1:
            raise ValueError("not now")
        return logits


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_processor_that_fails_leaves_generate_as_before_the_step(at):
    session = make()
    params = [SamplingParams(max_new_tokens=9), SamplingParams(max_new_tokens=9, logits_processors=[FailsAt(at)])]
    events = session.generate([[1, 2], [3]], params)
    with pytest.raises(ProcessorError) as error:
        list(events)
    assert str(error.value) == f"request 1: logits_processors[0] ({FailsAt.__name__}): it raised ValueError: not now"
    for slot, prompt in enumerate([[1, 2], [3]]):
        chosen = continuation(prompt, at)
        assert (session.tokens(slot), session.pending_tokens(slot)) == ((*prompt, *chosen[:-1]), tuple(chosen[-1:]))
    assert session.cache.host_kv_cache_lengths == (2 + at - 1, 1 + at - 1)
    found = by_prompt(session.generate([[7], [8]], append=True, max_new_tokens=3))
    assert [one for one, _, _ in found] == [continuation([*p, *continuation(p, at), t], 3) for p, t in (([1, 2], 7), ([3], 8))]


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_whose_processor_failed_can_be_repeated(at):
    session = make(slots=2)
    good = session.submit([1, 2], max_new_tokens=6)
    bad = session.submit([3], max_new_tokens=6, logits_processors=[FailsAt(at)])
    failures = []
    while not (good.finished and bad.finished):
        before = (good.tokens, bad.tokens, good.events, bad.events)
        try:
            session.step()
        except ProcessorError as error:
            failures.append((error.request, before == (good.tokens, bad.tokens, good.events, bad.events)))
    assert failures == [(bad.index, True)]
    assert (list(good.tokens), list(bad.tokens)) == (continuation([1, 2], 6), continuation([3], 6))


def test_a_request_whose_processor_always_fails_can_be_cancelled():
    session = make(slots=2)
    good = session.submit([1, 2], max_new_tokens=4)
    bad = session.submit([3], logits_processors=[lambda seen, logits: None])
    with pytest.raises(ProcessorError, match=r"^request 1: logits_processors\[0\] .*got NoneType\.$") as error:
        session.step()
    assert error.value.request == bad.index
    bad.cancel()
    drain(session)
    assert list(good.tokens) == continuation([1, 2], 4)


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused_at_once():
    session = make()
    for call in (session.generate, session.submit):
        text = refuse(session, RangeError, lambda call=call: call([1, 2], logit_bias={VOCAB: 1.0}))
        assert text == f"SamplingParams.logit_bias: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."
