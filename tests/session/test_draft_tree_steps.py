"""Trees that grow where the logits are: those of the host, for a draft model and for a head, without a wait between their levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.eagle3 import write_head, write_model as write_eagle_model
from tests.helpers.models import write_model
from tests.helpers.sessions import draft_lengths
from tests.session.reference_sessions import OPTIONS
from tests.session.test_model_drafter import small_of
from trt_kvcache import DraftTree, InferenceSession, SamplingParams
from trt_kvcache.session.draft_tree_steps import DraftTreeSteps

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [3, 4], [20, 21, 22]]

Open = Callable[..., InferenceSession]


@pytest.fixture(autouse=True)
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all requests draft, whatever was accepted, by different numbers of levels."""
    draft_lengths(monkeypatch, lambda drafting: 4 - drafting.proposed % 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A model and what drafts for it: a small model, and a head that reads its hidden states."""
    folder = tmp_path_factory.mktemp("models")
    eagle = write_eagle_model(folder / "eagle")
    return {
        "model": (write_model(folder / "large", scale=0.4), write_model(folder / "small", scale=0.4, seed=3)),
        "head": (eagle, write_head(folder / "head", eagle, scale=0.5)),
    }


@pytest.fixture(params=["model", "head"])
def opens(request: pytest.FixtureRequest, folders: dict[str, tuple[Path, Path]]) -> Iterator[Open]:
    """Return a function that opens a session whose trees grow on the device, or on the host."""
    sessions: list[InferenceSession] = []
    model, draft = folders[request.param]

    def open_one(*, on_device: bool, **options: Any) -> InferenceSession:
        sizes = {"max_batch_size": 3, "max_prefill_length": 24, "draft": draft, "draft_tree": 16, **options}
        sessions.append(InferenceSession.from_model(model, **{**OPTIONS, **sizes}))
        steps_of(sessions[-1]).on_device = on_device
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def steps_of(session: InferenceSession) -> DraftTreeSteps:
    steps = small_of(session)._steps
    assert isinstance(steps, DraftTreeSteps)
    return steps


class Grown:
    """Notes the trees of a session, and how many enqueues ran them on the device."""

    def __init__(self, session: InferenceSession) -> None:
        self.trees: list[dict[int, DraftTree]] = []
        self.on_device = 0
        steps, runner = steps_of(session), small_of(session)._runner
        run, enqueue = steps.run, runner.enqueue_trees

        def noted(drafted: Any) -> Any:
            self.trees.append(run(drafted))
            return self.trees[-1]

        def counted(*arguments: Any) -> None:
            self.on_device += 1
            enqueue(*arguments)

        steps.run = noted  # type: ignore[method-assign]
        runner.enqueue_trees = counted  # type: ignore[method-assign]


def params(count: int = 20, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count, ignore_eos=True, **{"seed": seed, **options}) for seed in range(len(PROMPTS))]


def both(opens: Open, asked: list[SamplingParams], prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[Grown, Grown]:
    """Return the trees of the host and of the device, after a comparison of the tokens."""
    tokens, grown = [], []
    for on_device in (False, True):
        session = opens(on_device=on_device, **options)
        grown.append(Grown(session))
        tokens.append([(event.index, event.token) for event in session.generate(prompts, asked[: len(prompts)])])
    assert tokens[0] == tokens[1]
    assert not grown[0].on_device
    return grown[0], grown[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 0.7, "repetition_penalty": 1.4}], ids=str)
def test_trees_are_those_of_the_host(opens: Open, options: dict[str, Any]) -> None:
    """Of four levels, in a queue: slots have drafts of different lengths, or none; penalties count for the large model only."""
    host, device = both(opens, params(**options))
    assert device.trees == host.trees
    assert device.on_device > len(device.trees) > 5
    assert any(tree.depth == 4 and not tree.is_chain for trees in host.trees for tree in trees.values())
    assert len({frozenset(trees) for trees in host.trees}) > 2


def test_processors_of_logits_are_of_the_large_model(opens: Open) -> None:
    def without_five(tokens: Any, logits: np.ndarray) -> np.ndarray:
        logits[5] = -np.inf
        return logits

    host, device = both(opens, params(logits_processors=(without_five,)))
    assert device.trees == host.trees
    assert device.on_device


@pytest.mark.parametrize("full", [0, 1, 2])
def test_slots_that_are_nearly_full_have_trees_of_the_host(opens: Open, full: int) -> None:
    """One that others wait for, or that is between two others, has no room for the rows of their trees."""
    prompts = [[4], [*range(5, 10)]]
    prompts.insert(full, [*range(3, 21)])
    host, device = both(opens, params(40), prompts, max_sequence_length=27, max_prefill_length=27)
    assert device.trees == host.trees
    assert device.on_device or full != 2  # no slot that is full comes before others


def test_the_first_tokens_of_a_long_sequence(opens: Open) -> None:
    """A prompt of more tokens than an enqueue runs."""
    host, device = both(opens, params(8), [[*range(3, 24), *range(3, 15)], [8, 9]], max_prefill_length=16)
    assert device.trees == host.trees
    assert device.on_device


def test_a_step_waits_once_and_copies_no_logits(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opens(on_device=True)
    list(session.generate(PROMPTS[:2], params(4)[:2]))
    runner, waits = small_of(session)._runner, []
    monkeypatch.setattr(runner, "logits", lambda count: 1 / 0)
    monkeypatch.setattr(runner, "before_wait", lambda: waits.append(1))
    grown = Grown(session)
    list(session.generate(PROMPTS[:2], params(12)[:2]))
    assert grown.on_device > len(grown.trees) == len(waits) > 0


def test_a_step_that_fails_leaves_the_slots_as_they_were(opens: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [event.token for event in opens(on_device=True).generate(PROMPTS[:1], params()[0])]
    session = opens(on_device=True)
    handle, runner = session.submit(PROMPTS[0], params()[0]), small_of(session)._runner
    session.step()
    session.step()
    held = runner.slots
    with monkeypatch.context() as patch:
        patch.setattr(runner, "enqueue_trees", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.step()
    assert [slot.length for slot in runner.slots] == [min(slot.length, now.length) for slot, now in zip(held, runner.slots, strict=True)]
    assert list(runner.cache.host_kv_cache_lengths) == [slot.length for slot in runner.slots]
    while session.step():
        pass
    assert list(handle.tokens) == expected
