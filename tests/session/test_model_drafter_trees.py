"""Drafts of a small model as trees: the tokens are those without drafts, and more of them are accepted than of chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.models import write_model
from tests.helpers.recording import poison
from tests.helpers.sessions import by_prompt, drain
from tests.paths import GOLDEN
from tests.session.reference_sessions import OPTIONS, fails
from tests.session.test_model_drafter import PROMPTS, params, small_of
from trt_kvcache import DraftTree, InferenceSession
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.draft_tree_steps import DraftTreeSteps
from trt_kvcache.session.session_options import SessionOptions

Open = Callable[..., InferenceSession]

pytestmark = pytest.mark.usefixtures("choice_of_drafts")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "large", scale=0.4)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, large: Path) -> Path:
    """A model whose choices are often the second ones of the large one: its weights, with some noise."""
    from safetensors.numpy import load_file, save_file

    folder = write_model(tmp_path_factory.mktemp("models") / "near")
    random = np.random.default_rng(5)
    weights = load_file(large / "model.safetensors")
    noisy = {name: (weight + random.standard_normal(weight.shape) * 0.07).astype(weight.dtype) for name, weight in weights.items()}
    save_file(noisy, folder / "model.safetensors")
    return folder


@pytest.fixture
def opens(large: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, **options: Any) -> InferenceSession:
        sizes = {"max_batch_size": 3, "max_prefill_length": 24, "draft": draft, **options}
        sessions.append(InferenceSession.from_model(large, **{**OPTIONS, **sizes}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


class Watched:
    """Notes the trees of a drafter."""

    def __init__(self, session: InferenceSession) -> None:
        self.trees: list[DraftTree] = []
        drafter = session._drafter
        assert drafter is not None
        propose = drafter.propose

        def watched(sequences: Any) -> Any:
            found = propose(sequences)
            self.trees += [tree for tree in found if isinstance(tree, DraftTree)]
            return found

        drafter.propose = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize(("count", "tokens"), [(1, 12), (3, 20), (5, 8)])
def test_an_equal_model_has_the_longest_path_accepted_every_time(
    opens: Open, large: Path, temperature: float, count: int, tokens: int
) -> None:
    asked = params(temperature=temperature)[:count]
    expected = by_prompt(opens(None).generate(PROMPTS[:count], asked))
    session, chains = opens(large, draft_tree=tokens), opens(large)
    watched = Watched(session)
    assert by_prompt(session.generate(PROMPTS[:count], asked)) == expected
    list(chains.generate(PROMPTS[:count], asked))
    depths = sum(tree.depth for tree in watched.trees)
    assert session.statistics.accepted_tokens == depths > 0
    assert max(map(len, watched.trees)) == tokens - 1
    assert any(not tree.is_chain for tree in watched.trees)
    assert session.statistics.mean_acceptance_length == 1 + depths / len(watched.trees)
    if tokens > 15:
        # One step ahead, a chain becomes longer one step later.
        more = chains.statistics.decode_steps - session.statistics.decode_steps
        assert more in ((0, 1) if chains._decode_steps.on_device else (0,))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.2},
        {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2},
        {"presence_penalty": 1.5, "logit_bias": {7: 3}},
    ],
    ids=str,
)
def test_a_near_model_changes_no_token_and_saves_steps(opens: Open, near: Path, options: dict[str, Any]) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    trees, chains = opens(near, draft_tree=20), opens(near)
    for session in (trees, chains):
        assert by_prompt(session.generate(PROMPTS, params(**options))) == expected
    assert trees.statistics.decode_steps < chains.statistics.decode_steps
    assert trees.statistics.accepted_tokens > chains.statistics.accepted_tokens


def test_a_queue_with_cancels_and_steps_that_fail(opens: Open, near: Path) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(temperature=1.0)))
    session = opens(near, draft_tree=12)
    cancelled = session.submit([30, 31], max_new_tokens=20)
    handles = [session.submit(prompt, one) for prompt, one in zip(PROMPTS, params(temperature=1.0), strict=True)]
    session.step()
    session.step()
    cancelled.cancel()
    for _ in range(4):
        session.step()
        poison(session.cache)
        poison(small_of(session)._parts.cache)
    fails(session, session.step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_of(session)._parts.engine, "enqueue", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.step()
    drain(session)
    assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]
    assert all(handle.accepted_tokens <= handle.draft_tokens for handle in handles)


def test_slots_that_are_nearly_full(opens: Open, near: Path) -> None:
    prompts = [[*range(3, 24)], [*range(5, 14)], [4]]
    asked = params(40)[:3]
    expected = by_prompt(opens(None, max_sequence_length=27).generate(prompts, asked))
    session = opens(near, max_sequence_length=27, draft_tree=20)
    assert by_prompt(session.generate(prompts, asked)) == expected
    assert session.statistics.accepted_tokens > 0


def test_a_small_model_with_fewer_positions(opens: Open, tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", scale=0.4, max_position_embeddings=12)
    session = opens(short, draft_tree=16)
    expected = by_prompt(opens(None).generate(PROMPTS[:3], params()[:3]))
    assert by_prompt(session.generate(PROMPTS[:3], params()[:3])) == expected
    assert session.statistics.accepted_tokens > 0


def test_logits_that_are_not_finite_end_a_draft_and_no_sequence(opens: Open, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opens(near, draft_tree=12)
    batch, runner = small_of(session)._batch, small_of(session)._runner
    verify, enqueue, verified = batch.verify, runner.enqueue_trees, []

    def damaged(rows: Any, parents: Any = None) -> Any:
        verified.append(rows)
        return verify(rows, parents) * np.float32(np.nan)

    def damaged_on_device(trees: Any, count: int, width: int) -> None:
        verified.append(count)
        enqueue(trees, count, width)
        _, logits = runner.device_views(count * width)
        logits.memory.array(logits)[...] = np.nan

    monkeypatch.setattr(batch, "verify", damaged)
    monkeypatch.setattr(runner, "enqueue_trees", damaged_on_device)
    expected = by_prompt(opens(None).generate(PROMPTS[:3], params()[:3]))
    assert by_prompt(session.generate(PROMPTS[:3], params()[:3])) == expected
    assert verified


def test_logits_of_the_engines_are_as_many_as_the_tokens_of_a_tree(opens: Open, near: Path) -> None:
    session = opens(near, draft_tree=24, max_prefill_length=40)
    assert session.max_logits_per_slot >= 24
    assert small_of(session)._runner.plan.max_logits_per_slot == 24
    assert isinstance(small_of(session)._steps, DraftTreeSteps)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"draft": "m", "draft_tree": 1}, "draft_tree: expected an integer from 2 to 64, got 1."),
        ({"draft": "m", "draft_tree": 65}, "draft_tree: expected an integer from 2 to 64, got 65."),
        ({"draft_tree": 8}, "draft_tree: expected draft with the folder of a small model or a head, got draft=None."),
        ({"draft": "ngram", "draft_tree": 8}, "draft_tree: expected draft with the folder of a small model or a head, got draft='ngram'."),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        SessionOptions(**options)
    assert str(error.value) == text


def test_a_model_with_states_is_refused(large: Path) -> None:
    with pytest.raises(ConfigError) as error:
        InferenceSession.from_model(GOLDEN / "lfm2", **{**OPTIONS, "draft": large, "draft_tree": 8})
    assert str(error.value) == (
        "draft_tree: expected a model in an engine that takes trees, got one with recurrent states. Leave draft_tree out for chains."
    )


class Trees:
    def propose(self, sequences: Any) -> Any:
        return [DraftTree([5, 6], [-1, -1]) for _ in sequences]


def test_a_drafter_of_the_caller_for_an_engine_without_trees(opens: Open) -> None:
    session = InferenceSession.from_model(GOLDEN / "lfm2", **{**OPTIONS, "max_batch_size": 1})
    with session, pytest.raises(ConfigError) as error:
        list(session.generate([[5, 6]], max_new_tokens=6, draft=Trees()))
    assert "Trees.propose: expected chains, as the engine takes no trees (DraftedSequence.tree_limit is 0), got" in str(error.value)
