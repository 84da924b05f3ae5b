"""``text_perplexity``: each token once, from the window that has it first, as ``score`` gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from tests.helpers.models import write_model
from tests.paths import SHIPPED
from trt_kvcache import InferenceSession, perplexity, text_perplexity
from trt_kvcache.errors import ConfigError, RangeError

#: Rows of one enqueue are summed in another order than those of several.
TOLERANCE = 1e-4

TEXT = (SHIPPED / "text.txt").read_text(encoding="utf-8")[:400]


@pytest.fixture(scope="module")
def session() -> Iterator[InferenceSession]:
    with InferenceSession.from_model(SHIPPED, engine="reference", max_batch_size=3, max_sequence_length=200, max_logits_per_slot=32) as one:
        yield one


def logprobs(session: InferenceSession, tokens: list[int]) -> list[float]:
    return [value for value in session.score([tokens])[0].logprobs if value is not None]


def test_one_window_is_the_perplexity_of_score(session: InferenceSession) -> None:
    text = TEXT[:200]
    found = text_perplexity(session, text)
    assert found.perplexity == pytest.approx(perplexity(session.score([text])), rel=1e-9)
    assert (found.num_windows, found.window, found.num_scored) == (1, 200, found.num_tokens)


@pytest.mark.parametrize(("window", "stride"), [(16, 5), (17, 15), (9, 1), (64, None)])
@pytest.mark.parametrize("num_tokens", [2, 8, 16, 17, 40, 41])
def test_windows_of_token_ids(session: InferenceSession, num_tokens: int, window: int, stride: int | None) -> None:
    """Written out: each token is predicted from what its first window has before it."""
    tokens = session.tokenizer.encode(TEXT)[:num_tokens]
    found = text_perplexity(session, tokens, window=window, stride=stride)
    step = stride or window // 2
    expected = []
    for place in range(1, num_tokens):
        first = max(0, -(-(place - window + 1) // step)) * step
        expected.append(logprobs(session, tokens[first : place + 1])[-1])
    assert found.num_scored == num_tokens - 1
    assert found.logprob == pytest.approx(math.fsum(expected), rel=TOLERANCE)
    assert found.perplexity == pytest.approx(math.exp(-math.fsum(expected) / len(expected)), rel=TOLERANCE)


def test_each_window_begins_as_a_text_does(session: InferenceSession) -> None:
    plain = session.tokenizer.encode(TEXT, add_special_tokens=False)
    (beginning,) = session.tokenizer.encode("")
    found = text_perplexity(session, TEXT, window=50, stride=30)
    runs, scored = [], 0
    for start in range(0, len(plain), 30):
        run = plain[start : start + 49]
        runs += logprobs(session, [beginning, *run])[scored - start :]
        scored = start + len(run)
        if scored == len(plain):
            break
    assert (found.num_scored, found.num_tokens) == (len(plain), len(plain))
    assert found.logprob == pytest.approx(math.fsum(runs), rel=TOLERANCE)


def test_progress_counts_windows(session: InferenceSession) -> None:
    seen: list[Any] = []
    found = text_perplexity(session, TEXT, window=50, stride=10, progress=lambda *one: seen.append(one))
    assert seen[-1] == (found.num_windows, found.num_windows)
    assert [done for done, _ in seen[:-1]] == [*range(3, found.num_windows, 3)]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TEXT, {"window": 201}, "window: expected an integer from 2 to 200, got 201"),
        (TEXT, {"window": 1}, "window: expected an integer from 2 to 200, got 1"),
        (TEXT, {"window": 2}, "window: expected more than the 2 tokens that begin a text, got 2"),
        (TEXT, {"window": 20, "stride": 19}, "stride: expected an integer from 1 to 18, got 19"),
        (TEXT, {"stride": 0}, "stride: expected an integer from 1 to 198, got 0"),
        ("", {}, "text: expected a token with something before it, got 0"),
        ([5], {}, "text: expected a token with something before it, got 1"),
    ],
)
def test_what_cannot_be_scored_is_refused(session: InferenceSession, text: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RangeError, match=message):
        text_perplexity(session, text, **options)


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with (
        InferenceSession.from_model(model, engine="reference", max_logits_per_slot="all") as session,
        raises(ConfigError, "text", expected="token ids", got="text"),
    ):
        text_perplexity(session, "a text")
