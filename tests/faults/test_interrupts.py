"""Ctrl-C at any line of the package: the session goes on, and nothing that it says about its sequences is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.sessions import GREEDY, MODEL, OPERATIONS, answers, check_contents, check_goes_on, check_usable, every_model, prepared
from tests.helpers.interrupts import LineTracer, lengths
from tests.helpers.sessions import ahead
from trt_kvcache import InferenceSession, RequestHandle
from trt_kvcache.cache import length_state


def interrupt_at_random_lines(
    folder: Path,
    name: str,
    count: int,
    seed: int,
    prepare: Callable[[InferenceSession], object] = lambda session: None,
    model: Path = MODEL,
) -> None:
    operation, chance = OPERATIONS[name], random.Random(seed)
    with prepared(folder, model) as calm:
        prepare(calm)
        visits = LineTracer(lambda: operation(calm, folder)).visits
        expected = answers(calm)
    lines = sorted(visits)
    with prepared(folder, model) as session:
        prepare(session)
        for number in range(count):
            line = chance.choice(lines)
            at = (line, chance.randrange(visits[line]))
            try:
                LineTracer(lambda: operation(session, folder), at=at)
            except KeyboardInterrupt:
                pass
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}, number {number}, {at}") from error
            try:
                check_goes_on(session)
                check_usable(session, expected)
                list(session.generate([[5, 6, 7, 8, 9], [10, 11]], temperature=0.0, ignore_eos=True, max_new_tokens=3))
            except Exception as error:
                raise AssertionError(f"{name}, seed {seed}, number {number}, after an interrupt at {at}") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # memory that was being released
@every_model
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_some_lines(tmp_path: Path, name: str, model: Path) -> None:
    interrupt_at_random_lines(tmp_path, name, 2, seed=0, model=model)


@pytest.mark.parametrize("name", ["generate", "submit and step", "resume"])
def test_an_interrupt_at_some_lines_with_tokens_chosen_one_step_ahead(tmp_path: Path, name: str) -> None:
    interrupt_at_random_lines(tmp_path, name, 12, seed=2, prepare=ahead)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def interrupted_compaction(session: InferenceSession, monkeypatch: pytest.MonkeyPatch) -> RequestHandle:
    """Return the running request whose rows were moved to the slot of one that has ended, when the interrupt came."""
    ends = session.submit([5, 6, 7, 8, 9], **{**GREEDY, "max_new_tokens": 2})
    goes_on = session.submit([10, 11], **{**GREEDY, "max_new_tokens": 9})
    while not ends.finished:
        session.step()
    with monkeypatch.context() as patch:
        patch.setattr(length_state, "compact_lengths_kernel", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.step()
    return goes_on


@every_model
def test_an_interrupt_after_the_rows_of_a_compaction_were_moved(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(tmp_path, model) as session:
        expected = answers(session)
        goes_on = interrupted_compaction(session, monkeypatch)
        lengths(session)
        check_contents(session)
        check_usable(session, expected)
        assert len(goes_on.tokens) == 9


def test_a_compaction_that_was_interrupted_costs_running_requests_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(tmp_path) as session:
        goes_on = interrupted_compaction(session, monkeypatch)
        before = session.statistics.prefill_tokens
        while session.step():
            pass
        assert (len(goes_on.tokens), session.statistics.prefill_tokens) == (9, before)


def test_an_interrupt_before_slots_of_another_call_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are still those of ``generate`` afterwards: they must be freed by the next step."""
    with prepared(tmp_path) as session:
        expected = answers(session)
        handle = session.submit([5, 6, 7], temperature=0.0, ignore_eos=True, max_new_tokens=2)
        with monkeypatch.context() as patch:
            patch.setattr(session.cache.lengths, "reset", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.step()
        while session.step():
            pass
        assert len(handle.tokens) == 2
        check_usable(session, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was opened and not yet in its block
@every_model
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_a_thousand_lines(tmp_path: Path, name: str, model: Path) -> None:
    interrupt_at_random_lines(tmp_path, name, 120, seed=1, model=model)
