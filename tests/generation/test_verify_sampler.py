"""Choices on the device at the positions of drafts: those of ``Request.choose_verified`` on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache import SamplingParams
from trt_kvcache.errors import EngineError, KVCacheError
from trt_kvcache.generation.draft_tree import DraftTree
from trt_kvcache.generation.request import Choice, Request
from trt_kvcache.generation.verify_sampler import VerifySampler

VOCAB, WIDTH = 700, 4

PARAMS = [
    SamplingParams(seed=1, temperature=0),
    SamplingParams(seed=2, temperature=0.9, top_p=0.9, logprobs=0),
    SamplingParams(seed=3, temperature=1.3, top_k=40, counter=11),
    SamplingParams(seed=4, temperature=0.7, min_p=0.02, logprobs=5, max_new_tokens=3),
]
#: Tokens of the draft of each request; None for an idle slot.
DRAFTS = [3, 0, None, 2]


def requests_of(params: list[SamplingParams] = PARAMS) -> list[Request]:
    return [Request(index, [5, 6], one, tokenizer=None, eos_token_ids=()) for index, one in enumerate(params)]


class Scene:
    """A sampler, and requests that choose from the same logits on the host."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        self.sampler = VerifySampler(memory, max_rows=len(PARAMS) * WIDTH, vocab_size=VOCAB, stream=stream)
        self.requests = requests_of()
        self.rng = np.random.default_rng(8)

    def logits(self, count: int = len(PARAMS), width: int = WIDTH) -> Any:
        return (self.rng.normal(size=(count, width, VOCAB)) * 2).astype(np.float32)

    def step(self, logits: Any, drafts: list[list[int] | None]) -> list[list[Choice]]:
        positions = [
            None if draft is None else request.positions(range(len(draft) + 1))
            for request, draft in zip(self.requests[: len(drafts)], drafts, strict=True)
        ]
        count, width = logits.shape[:2]
        on_device = self.memory.to_device(logits.reshape(count * width, VOCAB), stream=self.stream)
        sampled = self.sampler.choose(on_device, positions, width, stream=self.stream).read()
        return [
            [] if draft is None else request.receive_verified(found, DraftTree.chain(draft), room=WIDTH).choices
            for request, found, draft in zip(self.requests[: len(drafts)], sampled, drafts, strict=True)
        ]


@pytest.fixture
def scene(memory: Any, stream: Any) -> Scene:
    return Scene(memory, stream)


def on_host(request: Request, logits: Any, draft: list[int]) -> list[Choice]:
    return request.choose_verified(logits[: len(draft) + 1], DraftTree.chain(draft), room=WIDTH, waits=True).choices


def same(found: list[Choice], expected: list[Choice]) -> None:
    assert [choice.token.token for choice in found] == [choice.token.token for choice in expected]  # type: ignore[union-attr]
    assert [choice.progress for choice in found] == [choice.progress for choice in expected]
    for choice, wanted in zip(found, expected, strict=True):
        assert choice.token is not None
        assert wanted.token is not None
        assert choice.token.logprob == (None if wanted.token.logprob is None else pytest.approx(wanted.token.logprob, rel=2e-6))
        assert [token for token, _ in choice.token.top_logprobs or ()] == [token for token, _ in wanted.token.top_logprobs or ()]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_choices_are_those_of_the_host(scene: Scene, right: int) -> None:
    for _ in range(3):
        logits = scene.logits()
        drafts: list[list[int] | None] = []
        for request, row, length in zip(scene.requests, logits, DRAFTS, strict=True):
            if length is None:
                drafts.append(None)
                continue
            draft: list[int] = []
            for place in range(length):  # right up to a place
                chosen = on_host(request, row, draft)[-1].token
                assert chosen is not None
                draft.append(chosen.token if place < right else (chosen.token + 1) % VOCAB)
            drafts.append(draft)
        found = scene.step(logits, drafts)
        for request, row, choices, draft in zip(scene.requests, logits, found, drafts, strict=True):
            if draft is None:
                assert choices == []
                continue
            same(choices, on_host(request, row, draft))
            if not request.finished:
                request.take(choices[0])


def test_fewer_requests_and_narrower_rows(scene: Scene) -> None:
    scene.step(scene.logits(), [[1, 2, 3]] * len(PARAMS))
    logits = scene.logits(2, 2)
    found = scene.step(logits, [[7], [8]])
    for request, row, choices, draft in zip(scene.requests, logits, found, ([7], [8]), strict=False):
        same(choices, on_host(request, row, draft))


def test_logits_that_are_not_finite_fail_at_their_position_alone(scene: Scene) -> None:
    logits = scene.logits()
    logits[0, 2, 9], logits[1, 0, 9], logits[3, 3, 9] = np.nan, np.inf, np.nan
    greedy = [int(row.argmax()) for row in logits[0, :2]]
    with raises(EngineError, "logits", got="inf"):
        scene.step(logits, [[*greedy, 1], [3], None, [1]])
    logits[1, 0, 9] = 0
    found = scene.step(logits, [[*greedy, 1], [3], None, [1]])
    assert [len(choices) for choices in found[:1]] == [2]  # the error of the third position comes with the next step
    with pytest.raises(KVCacheError):
        scene.step(logits[:, 2:], [[], [3], None, [1]])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(presence_penalty=-0.1),
        SamplingParams(logprobs=21),
    ],
)
def test_requests_whose_positions_depend_on_each_other_do_not_fit(params: SamplingParams) -> None:
    [request] = requests_of([params])
    assert not request.fits_positions


def test_others_fit() -> None:
    assert all(request.fits_positions for request in requests_of())
