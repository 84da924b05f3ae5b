"""Drafts of a small model, with a cache and an engine of its own: the tokens are those without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from tests.helpers.models import write_model
from tests.helpers.recording import poison
from tests.helpers.sessions import by_prompt, draft_logits, drain
from tests.paths import GOLDEN, ROOT
from tests.session.reference_sessions import OPTIONS, fails
from trt_kvcache import DraftedSequence, InferenceSession, SamplingParams
from trt_kvcache.errors import CheckpointError, ConfigError
from trt_kvcache.generation.request import Request
from trt_kvcache.session import open_model as opening
from trt_kvcache.session.model_drafter import ModelDrafter
from trt_kvcache.session.session_options import SessionOptions

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [3, 4], [20, 21, 22]]

Open = Callable[..., InferenceSession]

pytestmark = pytest.mark.usefixtures("choice_of_drafts")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "large")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other weights, whose vocabulary is larger."""
    return write_model(tmp_path_factory.mktemp("models") / "small", seed=8, vocab_size=40)


@pytest.fixture
def opens(large: Path) -> Iterator[Open]:
    sessions: list[InferenceSession] = []

    def open_one(draft: Any, **options: Any) -> InferenceSession:
        sessions.append(InferenceSession.from_model(large, **{**OPTIONS, "max_batch_size": 3, "draft": draft, **options}))
        return sessions[-1]

    yield open_one
    for session in sessions:
        session.close()


def params(count: int = 20, **options: Any) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count, ignore_eos=True, **{"seed": seed, **options}) for seed in range(len(PROMPTS))]


def small_of(session: InferenceSession) -> ModelDrafter:
    drafter = session._drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_an_equal_model_has_all_of_its_drafts_accepted(opens: Open, large: Path, temperature: float, count: int) -> None:
    """It has the same logits, and the same random numbers."""
    asked = params(temperature=temperature)[:count]
    expected = by_prompt(opens(None).generate(PROMPTS[:count], asked))
    session = opens(large)
    assert by_prompt(session.generate(PROMPTS[:count], asked)) == expected
    counts = session.statistics
    assert counts.accepted_tokens == counts.draft_tokens > 0
    assert counts.decode_steps < opens(None).max_sequence_length / 2


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2}, {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 2}])
def test_another_model_changes_no_token(opens: Open, other: Path, options: dict[str, Any]) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(**options)))
    session = opens(other)
    assert by_prompt(session.generate(PROMPTS, params(**options))) == expected
    counts = session.statistics
    assert counts.draft_tokens > 0
    assert counts.accepted_tokens < counts.draft_tokens


def test_a_queue_with_cancels_and_steps_that_fail(opens: Open, large: Path, other: Path) -> None:
    expected = by_prompt(opens(None).generate(PROMPTS, params(temperature=1.0)))
    for folder in (large, other):
        session = opens(folder)
        cancelled = session.submit([30, 31], max_new_tokens=20)
        handles = [session.submit(prompt, one) for prompt, one in zip(PROMPTS, params(temperature=1.0), strict=True)]
        session.step()
        session.step()
        cancelled.cancel()
        for _ in range(4):
            session.step()
            if session._runner.uncommitted is None:  # else rows of a step ahead are among those
                poison(session.cache)
            poison(small_of(session)._parts.cache)
        fails(session, session.step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(small_of(session)._parts.engine, "enqueue", lambda stream: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.step()
        drain(session)
        assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]


def test_a_conversation_keeps_what_the_small_model_has_of_it(opens: Open, large: Path) -> None:
    session = opens(large)
    first = [event.token for event in session.generate([PROMPTS[0]], max_new_tokens=6, ignore_eos=True)]
    whole = [*PROMPTS[0], *first, 9, 8]
    again = [event.token for event in session.generate([whole], max_new_tokens=9, ignore_eos=True, reuse=True)]
    assert again == [event.token for event in opens(None).generate([whole], max_new_tokens=9, ignore_eos=True)]
    assert session.statistics.accepted_tokens == session.statistics.draft_tokens


def test_slots_of_requests_that_go_on_later(opens: Open, large: Path) -> None:
    """Requests with and without drafts move between slots; a slot that another request took is filled again."""
    session = opens(large, max_batch_size=2)
    drafter = small_of(session)
    asked = params(16, temperature=1.0)
    handles = [
        session.submit(prompt, one, draft="off" if index == 1 else None)
        for index, (prompt, one) in enumerate(zip(PROMPTS, asked, strict=True))
    ]
    drain(session)
    expected = by_prompt(opens(None).generate(PROMPTS, asked))
    assert [list(handle.tokens) for handle in handles] == [tokens for tokens, _, _ in expected]
    assert all(handle.accepted_tokens == handle.draft_tokens for handle in handles)
    assert len({slot for slot, _ in drafter._places.values()}) == len(drafter._places)


def test_a_new_request_takes_a_slot_that_no_other_has(opens: Open, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = small_of(opens(large))
    requests = [Request(index, row, SamplingParams(seed=1), tokenizer=None, eos_token_ids=()) for index, row in enumerate(PROMPTS)]

    def propose(*indexes: int) -> None:
        rows = [DraftedSequence(requests[index], PROMPTS[index], len(PROMPTS[index]), (9,), 3) for index in indexes]
        assert [len(draft) for draft in drafter.propose(rows)] == [3] * len(indexes)

    def held() -> list[int]:
        return [index for slot in range(3) for index, row in enumerate(PROMPTS) if drafter._batch[slot].tokens[: len(row)] == row]

    propose(0, 1)
    assert held() == [0, 1]
    propose(2)
    assert held() == [0, 1, 2]
    propose(1, 3)
    assert held() == [3, 1, 2]
    assert drafter._runner.slots[1].length == len(PROMPTS[1]) + 3
    ran, enqueue = [], drafter._runner._enqueue
    monkeypatch.setattr(drafter._runner, "_enqueue", lambda chunk, parents=None: (ran.append(sum(chunk.takes)), enqueue(chunk)))
    propose(2)
    assert ran == [1, 1, 1]  # the last token again, and two of the draft


def test_the_padding_of_a_draft_does_not_reach_past_a_slot_that_is_nearly_full(
    opens: Open, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[*range(3, 24)], [*range(5, 14)]]
    requests = [Request(index, row, SamplingParams(seed=1), tokenizer=None, eos_token_ids=()) for index, row in enumerate(rows)]

    def propose(drafter: ModelDrafter, index: int) -> list[list[int]]:
        return drafter.propose([DraftedSequence(requests[index], rows[index], len(rows[index]), (9,), 2)])

    expected = [propose(small_of(opens(large, max_sequence_length=24)), index) for index in range(2)]
    drafter, ends = small_of(opens(large, max_sequence_length=24)), []
    enqueue, runner = drafter._runner._enqueue, drafter._runner
    monkeypatch.setattr(
        runner, "_enqueue", lambda chunk, parents=None: (ends.append(max(runner._starts(chunk)) + chunk.width), enqueue(chunk))
    )
    assert [propose(drafter, index) for index in range(2)] == expected
    assert drafter._batch.held[:2] == [23, 11]
    assert max(ends) <= 24
    rows[0].append(expected[0][0][0])
    assert propose(drafter, 0) == propose(small_of(opens(large, max_sequence_length=24)), 0)


def test_logits_that_are_not_finite_end_a_draft_and_no_sequence(opens: Open, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opens(large)
    draft_logits(small_of(session), monkeypatch, change=np.nan)
    expected = by_prompt(opens(None).generate(PROMPTS[:3], params()[:3]))
    assert by_prompt(session.generate(PROMPTS[:3], params()[:3])) == expected
    assert session.statistics.draft_tokens == 0


def test_a_small_model_with_fewer_positions_drafts_as_far_as_it_has_them(opens: Open, tmp_path: Path) -> None:
    short = write_model(tmp_path / "short", max_position_embeddings=12)
    session = opens(short)
    expected = by_prompt(opens(None).generate(PROMPTS[:3], params()[:3]))
    assert by_prompt(session.generate(PROMPTS[:3], params()[:3])) == expected
    assert small_of(session)._batch.max_sequence_length == 12
    assert session.statistics.accepted_tokens == session.statistics.draft_tokens > 0


def test_an_engine_folder_generates_drafts(opens: Open, large: Path, tmp_path: Path) -> None:
    folder = make_engine_folder(large, tmp_path / "engine").path  # of 3 slots
    session = opens(folder)
    assert len([*session.generate([PROMPTS[0]], max_new_tokens=9, ignore_eos=True)]) == 9
    assert session.statistics.draft_tokens
    with pytest.raises(ConfigError) as error:
        opens(folder, max_batch_size=4)
    assert f"draft: {folder}: expected an engine of 4 slots or more, got one of 3." in str(error.value)


def test_both_models_close_together(opens: Open, large: Path) -> None:
    session = opens(large)
    parts = small_of(session)._parts
    session.close()
    assert parts.cache.closed
    assert session.cache.memory.live_nbytes == parts.cache.memory.live_nbytes == 0


@pytest.mark.parametrize(
    ("draft", "kind", "text"),
    [
        (GOLDEN / "lfm2", ConfigError, "draft: expected a model without recurrent states"),
        (
            ROOT / "examples" / "tiny-llama",
            ConfigError,
            "expected a model with the tokenizer of the large one, got one with another vocabulary",
        ),
        ("eagle", CheckpointError, "eagle: expected a model folder, an engine folder, or an id of the Hugging Face Hub"),
    ],
)
def test_what_cannot_draft_is_refused_and_leaves_nothing_open(
    opens: Open, monkeypatch: pytest.MonkeyPatch, draft: Any, kind: type[Exception], text: str
) -> None:
    made: list[Any] = []

    class Counted(opening.HostMemory):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(opening, "HostMemory", Counted)
    with pytest.raises(kind) as error:
        opens(draft)
    assert text in str(error.value)
    assert made or kind is CheckpointError  # a folder that is not there is noticed before the large model is opened
    assert all(memory.live_nbytes == 0 for memory in made)


def test_a_model_with_fewer_token_ids_is_refused(opens: Open, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "few", vocab_size=29)
    with raises(ConfigError, "draft", expected="at least the 37 token ids", got="29"):
        opens(folder)


@pytest.mark.parametrize("draft", [3, "", ["ngram"]])
def test_an_option_that_is_no_path_is_refused(draft: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SessionOptions(draft=draft)
    assert str(error.value) == f"draft: expected ngram, mtp or the folder of a model, got {draft!r}."
