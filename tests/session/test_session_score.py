"""``InferenceSession.score``: the log-softmax of what each token follows, for any prompts, from one prefill."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.helpers.recording import VOCAB, logits_after
from tests.helpers.sessions import continuation, damage_logits, make, refuse
from tests.session.every_logit import with_every_logit
from tests.session.reference_sessions import LONG, fails
from trt_kvcache import InferenceSession, perplexity
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, EngineError, RangeError, ShapeError

Open = Callable[..., InferenceSession]

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [7], [8, 9], [5, 5, 5, 5, 5, 5], [3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


def expected(prompt: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens but the first."""
    return [log_softmax(logits_after(prompt[:place]))[prompt[place]] for place in range(1, len(prompt))]


@pytest.mark.parametrize(("slots", "limit", "logits"), [(3, 16, 5), (1, 16, 5), (3, 16, 2), (3, 16, 6), (2, 13, 5), (8, 16, 4)])
def test_each_token_given_those_before_it(slots: int, limit: int, logits: int) -> None:
    with with_every_logit(slots=slots, limit=limit, logits=logits) as session:
        scores = session.score(PROMPTS)
        assert [list(score.tokens) for score in scores] == PROMPTS
        for score, prompt in zip(scores, PROMPTS, strict=True):
            assert score.logprobs[0] is None
            np.testing.assert_allclose(np.array(score.logprobs[1:], float), expected(prompt), rtol=1e-5)
            assert score.top_logprobs is None


def test_the_most_likely_tokens_at_each_place() -> None:
    with with_every_logit() as session:
        [score] = session.score([PROMPTS[0]], top_logprobs=4)
    assert score.top_logprobs is not None
    assert score.top_logprobs[0] is None
    for place, top in enumerate(score.top_logprobs[1:], start=1):
        values = log_softmax(logits_after(PROMPTS[0][:place]))
        assert top is not None
        assert [token for token, _ in top] == np.argsort(-values, kind="stable")[:4].tolist()
        np.testing.assert_allclose([value for _, value in top], np.sort(values)[::-1][:4], rtol=1e-5)


def test_all_tokens_are_the_most_likely_ones_at_most() -> None:
    with with_every_logit() as session:
        [score] = session.score([[1, 2]], top_logprobs=9999)
    assert score.top_logprobs is not None
    assert score.top_logprobs[1] is not None
    assert len(score.top_logprobs[1]) == VOCAB


def test_one_prompt_alone() -> None:
    with with_every_logit() as session:
        assert session.score([1, 2, 3]) == session.score([[1, 2, 3]])


def test_it_takes_prefills_not_steps() -> None:
    with with_every_logit() as session:
        session.score([[*range(13)]])
        assert [len(step.input_ids[0]) for step in session.engine.steps] == [5, 5, 2]
        assert session.statistics.prefill_tokens == 12
        assert session.statistics.decode_steps == 0


def test_prompts_of_similar_length_run_together() -> None:
    with with_every_logit(slots=2) as session:
        session.score([[1] * 6, [1, 2], [2] * 6, [3, 4]])
        assert [step.input_ids for step in session.engine.steps] == [[[1] * 5, [2] * 5], [[1], [3]]]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    with with_every_logit() as session:
        [score] = session.score([[7]])
        assert session.engine.steps == []
    assert (score.tokens, score.logprobs, score.num_scored, score.logprob) == ((7,), (None,), 0, 0.0)
    assert math.isnan(score.perplexity)


def test_it_takes_the_place_of_the_active_sequences() -> None:
    with with_every_logit() as session:
        session.prefill([[1, 2], [3]])
        session.score(PROMPTS)
        assert session.cache.active_batch_size == 0
        np.testing.assert_array_equal(session.prefill([[1, 2]]), [logits_after([1, 2])])


def test_submitted_requests_go_on_afterwards() -> None:
    with with_every_logit() as session:
        handle = session.submit([5, 6, 7], max_new_tokens=6, ignore_eos=True)
        session.step()
        session.step()
        session.score(PROMPTS)
        while session.step():
            pass
        assert list(handle.tokens) == continuation([5, 6, 7], 6)


def test_the_prompt_cache_is_neither_read_nor_written(opened: Open) -> None:
    session = opened(prompt_cache_bytes=1 << 20, max_logits_per_slot="all")
    session.prefill([LONG])
    before = (session.prompt_cache.entries, session.prompt_cache.hits, session.prompt_cache.misses)
    session.score([LONG, [*LONG, 20]])
    assert (session.prompt_cache.entries, session.prompt_cache.hits, session.prompt_cache.misses) == before
    assert session.statistics.reused_tokens == 0


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@pytest.mark.parametrize("logits", [2, 5, "all"])
def test_it_is_what_steps_of_one_token_give(opened: Open, attention: str, logits: int | str) -> None:
    prompts = [LONG, [4, 4, 20, 3], [30, 2, 1, 9, 9, 8, 7]]
    scores = opened(attention=attention, max_logits_per_slot=logits).score(prompts)
    steps = opened(attention=attention, max_batch_size=1)
    for prompt, score in zip(prompts, scores, strict=True):
        logits_at = [steps.prefill([prompt[:1]])[0], *(steps.decode([token])[0] for token in prompt[1:-1])]
        found = [log_softmax(row)[token] for row, token in zip(logits_at, prompt[1:], strict=True)]
        assert_close(score.logprobs[1:], found)


def test_it_is_what_generate_reports(opened: Open) -> None:
    session = opened(max_logits_per_slot="all")
    events = list(session.generate([LONG], max_new_tokens=8, ignore_eos=True, logprobs=2))
    [score] = session.score([[*LONG, *(event.token for event in events)]], top_logprobs=2)
    assert score.top_logprobs is not None
    assert_close(score.logprobs[len(LONG) :], [event.logprob for event in events])
    assert [[token for token, _ in top or ()] for top in score.top_logprobs[len(LONG) :]] == [
        [token for token, _ in event.top_logprobs or ()] for event in events
    ]


def test_text_is_scored_with_the_tokens_that_begin_it(shipped: InferenceSession) -> None:
    text = "Alice was beginning to get very tired."
    [score] = shipped.score(text)
    assert shipped.tokenizer is not None
    assert list(score.tokens) == shipped.tokenizer.encode(text)
    shuffled, other = shipped.score(["tired very get to beginning was Alice.", text])
    assert_close(other.logprobs[1:], score.logprobs[1:])
    assert shuffled.perplexity > 10 * score.perplexity
    assert min(score.perplexity, shuffled.perplexity) < perplexity([score, shuffled]) < max(score.perplexity, shuffled.perplexity)


@pytest.fixture
def shipped():
    with InferenceSession.from_model("examples/tiny-llama", engine="reference", max_batch_size=2, max_logits_per_slot=16) as session:
        yield session


@pytest.mark.parametrize(("slots", "logits"), [(1, 64), (900, 58)])
def test_the_default_has_room_for_logits_of_a_bounded_size(slots: int, logits: int) -> None:
    with InferenceSession.from_model("examples/tiny-llama", engine="numpy", max_batch_size=slots, max_sequence_length=128) as session:
        assert session.max_logits_per_slot == logits


class TestRefusals:
    def test_an_engine_with_the_logits_of_one_token(self) -> None:
        with make() as session:
            session.prefill([[1, 2]])
            assert refuse(session, ConfigError, lambda: session.score([[1, 2]])) == (
                "score: expected an engine with the logits of 2 new tokens per slot or more, got one with those of 1. Build it with "
                "max_logits_per_slot (trt-kvcache build --max-logits-per-slot all), or open a model folder with it. "
                "The NumPy and PyTorch engines have up to 64, but not more than max_prefill_length."
            )

    @pytest.mark.parametrize(
        ("prompts", "kind", "message"),
        [
            ([], ShapeError, "prompts: expected at least one, got none."),
            ([[1], []], ShapeError, "prompts[1]: expected at least one token, got none."),
            ([[1], [1] * 17], CapacityError, "prompt 1 has 17 tokens; that exceeds max_sequence_length=16. Nothing was changed."),
            ([[1, VOCAB]], RangeError, f"prompts[0][1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
            (["text"], ConfigError, "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
        ],
    )
    def test_prompts_that_cannot_be_run(self, prompts, kind, message) -> None:
        with with_every_logit() as session:
            session.prefill([[1, 2], [3]])
            assert refuse(session, kind, lambda: session.score(prompts)) == message

    def test_a_number_of_tokens_below_0(self) -> None:
        with with_every_logit() as session:
            text = refuse(session, RangeError, lambda: session.score([[1, 2]], top_logprobs=-1))
        assert text == "top_logprobs: expected at least 0, got -1."

    def test_a_closed_session(self) -> None:
        with with_every_logit() as session:
            pass
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            session.score([[1, 2]])


def test_a_step_that_fails_leaves_no_slot_active_and_the_session_usable(opened: Open) -> None:
    session = opened(max_logits_per_slot="all")
    session.prefill([[5, 6]])
    fails(session, lambda: session.score([LONG]))
    assert session.cache.active_batch_size == 0
    assert session.score([LONG]) == opened(max_logits_per_slot="all").score([LONG])


def test_logits_that_are_nan_are_an_error_of_the_engine() -> None:
    with with_every_logit() as session:
        mend = damage_logits(session, 1)
        with raises(EngineError, "logits", expected="finite numbers", got="nan"):
            session.score([[1, 2, 3]])
        mend()
        assert session.cache.active_batch_size == 0
        assert session.score([[1, 2, 3]])[0].num_scored == 2
