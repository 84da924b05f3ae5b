"""``verify`` and ``accept``: several tokens of each sequence in one enqueue, kept as far as they are accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.helpers.assertions import assert_close
from tests.helpers.recording import VOCAB, cache_rows, logits_after
from tests.helpers.sessions import continuation, make, observe, refuse
from tests.session.every_logit import with_every_logit
from tests.session.reference_sessions import fails
from tests.sweeps import each_once
from trt_kvcache import InferenceSession
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, ShapeError

Open = Callable[..., InferenceSession]
Drafter = Callable[[Sequence[int], int], list[int]]

PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]


def greedy(session: InferenceSession, prompts: Sequence[Sequence[int]], count: int, draft: Drafter) -> tuple[list[list[int]], int]:
    """Return ``count`` greedy tokens after each prompt, by speculative decoding, and how often ``verify`` was called."""
    chosen = [[int(row.argmax())] for row in session.prefill(prompts)]
    calls = 0
    while min(map(len, chosen)) < count:
        rows = []
        for prompt, tokens in zip(prompts, chosen, strict=True):
            room = min(session.engine.profiles[0].max_logits, count - len(tokens)) - 1  # of what is accepted, one token is no draft
            rows.append([tokens[-1], *draft([*prompt, *tokens], room)[:room]] if len(tokens) < count else [])
        logits, calls = session.verify(rows), calls + 1
        counts = []
        for tokens, row, of_slot in zip(chosen, rows, logits, strict=True):
            best = [int(one) for one in of_slot[: len(row)].argmax(axis=-1)]
            agreed = next((place for place, token in enumerate(row[1:]) if token != best[place]), max(len(row) - 1, 0))
            tokens += best[: agreed + 1]
            counts.append(agreed + 1 if row else 0)
        session.accept(counts)
    return chosen, calls


def drafters(truth: Callable[[Sequence[int], int], list[int]]) -> dict[str, Drafter]:
    """Return drafters of every quality; ``truth(tokens, count)`` are the greedy tokens that follow."""
    random = np.random.default_rng(3)

    def sometimes(tokens: Sequence[int], count: int) -> list[int]:
        return [token if random.random() < 0.7 else 0 for token in truth(tokens, int(random.integers(0, count + 1)))]

    return {
        "good": truth,
        "bad": lambda tokens, count: [0] * count,
        "empty": lambda tokens, count: [],
        "good, then bad": lambda tokens, count: [*truth(tokens, count)[: count // 2], *[0] * (count - count // 2)],
        "sometimes": sometimes,
        "one slot only": lambda tokens, count: truth(tokens, count) if tokens[0] == PROMPTS[0][0] else [],
    }


NAMES = tuple(drafters(continuation))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_token(slots: int, name: str) -> None:
    with with_every_logit(limit=32, slots=slots) as session:
        found, calls = greedy(session, PROMPTS[:slots], 14, drafters(continuation)[name])
        assert found == [continuation(prompt, 14) for prompt in PROMPTS[:slots]]
        if name == "good":
            assert calls == 3  # of 5, 5 and 3 tokens
        if name in ("bad", "empty"):
            assert calls == 13
        assert [list(session.tokens(slot)) for slot in range(slots)] == [
            [*prompt, *tokens[:-1]] for prompt, tokens in zip(PROMPTS, found, strict=False)
        ]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("name", "attention"), each_once(NAMES, ["native", "mask", "plugin"]))
def test_drafts_change_no_token_of_the_reference_engine(opened: Open, attention: str, slots: int, name: str) -> None:
    plain = opened(attention=attention)
    whole = {
        tuple(prompt): [*prompt, *(event.token for event in plain.generate([prompt], max_new_tokens=20, ignore_eos=True))]
        for prompt in PROMPTS
    }

    def truth(tokens: Sequence[int], count: int) -> list[int]:
        prompt = next(prompt for prompt in whole if tuple(tokens[: len(prompt)]) == prompt)
        return whole[prompt][len(tokens) : len(tokens) + count]

    session = opened(attention=attention, max_logits_per_slot=6)
    found, _ = greedy(session, PROMPTS[:slots], 20, drafters(truth)[name])
    assert [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, found, strict=False)] == [*whole.values()][:slots]


def test_logits_of_every_token_of_each_row() -> None:
    with with_every_logit() as session:
        session.prefill(PROMPTS)
        rows = [[9, 8, 7, 6], [5], [4, 3]]
        logits = session.verify(rows)
        assert (logits.shape, logits.dtype) == ((3, 4, VOCAB), np.float32)
        for prompt, row, of_slot in zip(PROMPTS, rows, logits, strict=True):
            expected = [logits_after([*prompt, *row[: place + 1]]) for place in range(len(row))]
            np.testing.assert_array_equal(of_slot[: len(row)], expected)
            assert np.isnan(of_slot[len(row) :]).all()
        kept = logits.copy()
        session.verify([[1], [1], [1]])
        np.testing.assert_array_equal(logits, kept)  # an array of its own


def test_one_enqueue_in_the_profile_for_drafts() -> None:
    with with_every_logit() as session:
        session.prefill(PROMPTS)
        session.verify([[9, 8, 7, 6], [5], [4, 3]])
        assert [(step.profile, step.shapes["last_token_ids"]) for step in session.engine.steps[1:]] == [("verify", (3, 4))]
        session.verify([[9], [5], [4]])
        assert (session.engine.steps[-1].profile, session.engine.steps[-1].shapes["last_token_ids"]) == ("decode", (3, 1))


def test_nothing_is_held_before_it_is_accepted() -> None:
    with with_every_logit() as session:
        session.prefill(PROMPTS)
        before = observe(session)
        session.verify([[9, 8, 7, 6], [5], [4, 3]])
        after = observe(session)
        assert after[:-2] == before[:-2]  # all but the statistics and the number of steps
        session.accept([2, 1, 0])
        assert [session.tokens(slot) for slot in range(3)] == [(5, 6, 7, 9, 8), (8, 9, 5), (1, 2, 3, 4)]
        assert session.cache.host_kv_cache_lengths == (5, 3, 4)
        np.testing.assert_array_equal(
            session.decode([1, 2, 3]), [logits_after(row) for row in ([5, 6, 7, 9, 8, 1], [8, 9, 5, 2], [1, 2, 3, 4, 3])]
        )


def test_what_is_accepted_is_what_steps_would_have_written(opened: Open) -> None:
    session, steps = opened(max_logits_per_slot=5), opened()
    session.prefill(PROMPTS)
    session.verify([[9, 8, 7, 6], [5, 1, 1, 1, 1], [4, 3]])
    session.accept([3, 1, 2])
    steps.prefill([[*PROMPTS[0], 9, 8, 7], [*PROMPTS[1], 5], [*PROMPTS[2], 4, 3]])
    assert_close(session.decode([1, 2, 3]), steps.decode([1, 2, 3]))


def test_rejected_tokens_leave_no_trace() -> None:
    with with_every_logit() as session, make() as other:
        for one in (session, other):
            one.prefill(PROMPTS)
        session.verify([[9, 8, 7, 6], [5, 5, 5], [4, 3]])
        session.accept([1, 0, 0])
        session.append([[2], [2], [2]])
        other.append([[9, 2], [2], [2]])
        assert cache_rows(session.cache) == cache_rows(other.cache)


def test_an_idle_slot_has_an_empty_row() -> None:
    with with_every_logit() as session:
        session.prefill(PROMPTS)
        logits = session.verify([[], [5, 6], []])
        assert np.isnan(logits[[0, 2]]).all()
        np.testing.assert_array_equal(logits[1], [logits_after([8, 9, 5]), logits_after([8, 9, 5, 6])])
        session.accept([0, 2, 0])
        assert [len(session.tokens(slot)) for slot in range(3)] == [3, 4, 4]


def test_the_tokens_take_the_place_of_pending_ones() -> None:
    with with_every_logit() as session:
        [*events] = session.generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)
        assert session.pending_tokens(0) == (events[-1].token,)
        session.verify([[events[-1].token, 9]])
        assert session.pending_tokens(0) == (events[-1].token,)
        session.accept([1])
        assert (session.pending_tokens(0), session.tokens(0)) == ((), (5, 6, 7, events[0].token, events[1].token))


@pytest.mark.parametrize("limit", [16, 7])
def test_a_slot_that_is_nearly_full_beside_a_long_draft(limit: int) -> None:
    with with_every_logit(limit=limit) as session:
        prompts = [[1] * (limit - 1), [8], [2] * (limit - 2)]
        session.prefill(prompts)
        before = observe(session)
        rows = [[3], [9, 8, 7, 6, 5], [4, 4]]
        logits = session.verify(rows)
        assert observe(session)[:-2] == before[:-2]
        for prompt, row, of_slot in zip(prompts, rows, logits, strict=True):
            expected = [logits_after([*prompt, *row[: place + 1]]) for place in range(len(row))]
            np.testing.assert_array_equal(of_slot[: len(row)], expected)
        session.accept([1, 4, 2])
        assert [session.tokens(slot) for slot in range(3)] == [(*prompts[0], 3), (8, 9, 8, 7, 6), (*prompts[2], 4, 4)]
        assert session.cache.host_kv_cache_lengths == (limit, 5, limit)


def test_statistics_count_what_was_accepted() -> None:
    with with_every_logit() as session:
        session.prefill(PROMPTS)
        session.verify([[9, 8, 7, 6], [5], [4, 3]])
        session.accept([2, 1, 0])
        assert (session.statistics.decode_steps, session.statistics.decode_tokens) == (1, 3)


class TestRefusals:
    def test_an_engine_with_the_logits_of_one_token(self) -> None:
        with make() as session:
            session.prefill([[1, 2]])
            assert refuse(session, ConfigError, lambda: session.verify([[3, 4, 5]])) == (
                "verify: expected an engine with the logits of 3 new tokens per slot or more, got one with those of 1. Build it with "
                "max_logits_per_slot (trt-kvcache build --max-logits-per-slot all), or open a model folder with it. "
                "The NumPy and PyTorch engines have up to 64, but not more than max_prefill_length."
            )
            np.testing.assert_array_equal(session.verify([[3]]), [[logits_after([1, 2, 3])]])  # one it has

    @pytest.mark.parametrize(
        ("rows", "kind", "message"),
        [
            ([[1], [2]], ShapeError, r"tokens: expected one for each of 3 active slots, got 2\."),
            ([[], [], []], ShapeError, r"tokens: expected at least one token of an active slot, got none\."),
            ([[1] * 6, [1], [1]], ConfigError, r"verify: expected an engine with the logits of 6 .*, got one with those of 5\..*"),
            ([[1], [VOCAB], [1]], RangeError, rf"tokens\[1\]\[0\]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
            ([1, 2, 3], ShapeError, r"tokens\[0\]: expected a sequence of token ids, got int\."),
            ("abc", ShapeError, r"tokens: expected a sequence, got str\."),
        ],
    )
    def test_rows_that_cannot_be_run(self, rows, kind, message) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            assert re.fullmatch(message, refuse(session, kind, lambda: session.verify(rows)))

    def test_a_slot_without_room(self) -> None:
        with with_every_logit() as session:
            session.prefill([[1] * 15, [2]])
            assert refuse(session, CapacityError, lambda: session.verify([[1, 2], [3]])) == (
                "slot 0 holds 15 tokens; adding 2 exceeds max_sequence_length=16. Nothing was changed."
            )

    @pytest.mark.parametrize("counts", [[5, 1, 1], [-1, 1, 1], [1, 2, 1], [True, 1.5, 1]])
    def test_counts_out_of_range(self, counts) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            session.verify([[9, 8, 7, 6], [5], [4, 3]])
            assert "counts[" in refuse(session, RangeError, lambda: session.accept(counts))
            session.accept([4, 1, 2])  # it can still be called

    def test_too_few_counts(self) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            session.verify([[9], [5], [4]])
            assert refuse(session, ShapeError, lambda: session.accept([1])) == "counts: expected one for each of 3 active slots, got 1."

    @pytest.mark.parametrize(
        "other",
        [
            lambda session: session.accept([1, 1, 1]),
            lambda session: session.rewind(0, 1),
            lambda session: session.decode([1, 2, 3]),
            lambda session: session.append([[1], [], []]),
            lambda session: session.prefill(PROMPTS),
            lambda session: session.score([[1, 2]]),
            lambda session: fails(session, lambda: session.verify([[1], [1], [1]])),
            lambda session: fails(session, lambda: session.decode([1, 1, 1])),
        ],
        ids=["accept", "rewind", "decode", "append", "prefill", "score", "a verify that failed", "a step that failed"],
    )
    def test_after_another_call(self, other) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            session.verify([[9, 8], [5], [4]])
            other(session)
            assert refuse(session, RangeError, lambda: session.accept([1, 1, 1])) == (
                "accept: expected a verify before it, and no other change of the sequences since. Call verify again."
            )

    def test_before_any_verify(self) -> None:
        with with_every_logit() as session:
            session.prefill(PROMPTS)
            refuse(session, RangeError, lambda: session.accept([1, 1, 1]))


@pytest.mark.parametrize("limit", [16, 7])
def test_an_enqueue_that_fails_changes_nothing(limit: int) -> None:
    with with_every_logit(limit=limit) as session:
        session.prefill([[1] * (limit - 1), [8], [2]])
        before = observe(session)
        run, enqueues = session.engine.enqueue, []

        def second_fails(stream: object) -> None:
            enqueues.append(stream)
            if len(enqueues) == 2:
                raise ZeroDivisionError
            run(stream)

        session.engine.enqueue = second_fails
        rows = [[3], [9, 8, 7, 6, 5], [4, 4]]
        with pytest.raises(ZeroDivisionError):
            session.verify(rows)
        assert observe(session)[:-2] == before[:-2]
        session.verify(rows)
        session.accept([1, 5, 2])
        assert session.tokens(1) == (8, 9, 8, 7, 6, 5)
