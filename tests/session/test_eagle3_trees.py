"""Drafts of an EAGLE-3 head as trees: its logits in float64 along each path, and tokens that are those without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.eagle3 import HeadInFloat64, write_head, write_model, write_ring_head, write_ring_model
from tests.helpers.mtp import ring_prompts
from tests.helpers.recording import Truth, known_truth
from tests.helpers.sessions import by_prompt, draft_lengths
from tests.session.reference_sessions import OPTIONS
from tests.session.test_eagle3_drafter import states_of, with_layers
from tests.session.test_mtp_drafter import PROMPTS, drafter_of, params
from trt_kvcache import DraftedSequence, DraftTree, InferenceSession

Open = Callable[..., InferenceSession]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return write_head(tmp_path_factory.mktemp("models") / "head", folder, scale=0.5)


@pytest.fixture
def opens(folder: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, model: Path = folder, **options: Any) -> InferenceSession:
        sizes = {"max_batch_size": 3, "max_prefill_length": 20, "draft": draft, **options}
        sessions.append(InferenceSession.from_model(model, **{**OPTIONS, **sizes}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


class WithTruth:
    """Adds the tokens that will follow to the trees of a head, after all others, and keeps what was proposed."""

    def __init__(self, drafter: Any, truth: Truth) -> None:
        self.drafter, self.truth = drafter, truth
        self.seen: list[tuple[list[int], int]] = []
        self.takes_device_states = True

    def propose(self, sequences: Sequence[DraftedSequence]) -> list[DraftTree]:
        found = []
        for one, tree in zip(sequences, self.drafter.propose(sequences), strict=True):
            assert isinstance(tree, DraftTree)
            assert one.hidden_states is not None
            self.seen.append((one.tokens, len(one.hidden_states)))
            known = self.truth(one, one.limit)[: one.tree_limit - len(tree)]
            parents = [-1, *range(len(tree), len(tree) + len(known))][: len(known)]
            found.append(DraftTree([*tree.tokens, *known], [*tree.parents, *parents]))
        return found


def test_logits_of_the_head_after_each_path(opens: Open, folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model accepts paths in the last rows of its steps: the head reads the hidden states of their tokens afterwards."""
    draft_lengths(monkeypatch, lambda drafting: 3)
    [plain] = [[*opens(None).generate(PROMPTS[1:2], params()[0])]]
    session, oracle = opens(head, draft_tree=10, max_batch_size=1), HeadInFloat64(head, folder)
    drafter = drafter_of(session)
    watched = WithTruth(drafter, known_truth(plain, PROMPTS[1:2]))
    runs: list[list[tuple[Sequence[int], Sequence[int], Any]]] = []
    append, verify = drafter._batch.append, drafter._batch.verify

    def appended(rows: Any) -> Any:
        runs.append([])
        return append(rows)

    def verified(rows: Any, parents: Any = None) -> Any:
        logits = verify(rows, parents)
        runs[-1].append((rows[0], parents[0], logits[0]))
        return logits

    monkeypatch.setattr(drafter._batch, "append", appended)
    monkeypatch.setattr(drafter._batch, "verify", verified)
    found = [*session.generate(PROMPTS[1:2], params()[0], draft=watched)]
    assert [event.token for event in found] == [event.token for event in plain]
    assert session.statistics.accepted_tokens > 8
    assert len(runs) == len(watched.seen) > 3
    assert max(map(len, runs)) == 2  # a tree of three levels, of which the last does not run
    with with_layers(folder, (2, 3, 4)) as layers:
        for (tokens, count), levels in zip(watched.seen, runs, strict=True):
            hidden, pairs = oracle.reduced(states_of(layers, tokens[:-1])[-count:]), tokens[len(tokens) - count :]
            for row, parents, logits in levels:
                after: list[Any] = []
                for index, (token, parent) in enumerate(zip(row, parents, strict=True)):
                    states, before = after[parent] if parent >= 0 else (hidden, pairs)
                    own, _ = oracle(before, states)
                    after.append((np.concatenate([states, own[-1:]]), [*before, token]))
                    _, expected = oracle(after[-1][1], after[-1][0])
                    assert_close(logits[index][oracle.tokens], expected[-1])


@pytest.mark.usefixtures("choice_of_drafts")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2}, {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2}], ids=str)
def test_a_head_changes_no_token(opens: Open, head: Path, options: dict[str, Any]) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    session = opens(head, draft_tree=12)
    assert by_prompt(session.generate(PROMPTS, params(**options))) == expected
    assert session.statistics.draft_tokens > 0


@pytest.mark.usefixtures("choice_of_drafts")
def test_a_head_that_is_right_has_the_longest_path_accepted(opens: Open, tmp_path: Path) -> None:
    ring = write_ring_model(tmp_path / "ring")
    place = write_ring_head(tmp_path / "head", ring)
    prompts = ring_prompts(3)
    expected = by_prompt(opens(None, ring).generate(prompts, params()[: len(prompts)]))
    trees, chains = opens(place, ring, draft_tree=18), opens(place, ring)
    for session in (trees, chains):
        assert by_prompt(session.generate(prompts, params()[: len(prompts)])) == expected
    assert trees.statistics.accepted_tokens == chains.statistics.accepted_tokens == chains.statistics.draft_tokens
    later = chains.statistics.decode_steps - trees.statistics.decode_steps
    assert later in (0, 1), "the draft of a step ahead is as long as the one before"
