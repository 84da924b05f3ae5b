"""Check F: sessions on each engine compute what the NumPy engine computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.compare import TOLERANCES, Array, check_close
from trt_kvcache.doctor.models import CheckedModel, own_model, short_model, tiny_model, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.stale_rows import check_stale_rows
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name, open_reference
from trt_kvcache.doctor.tokens import check_greedy
from trt_kvcache.session.session import InferenceSession


class Step(NamedTuple):
    """One call of a session, and the logits that are compared."""

    name: str
    run: Callable[[InferenceSession], Array]


#: A longer cache is not filled: the NumPy engine takes seconds for a prompt of thousands of tokens.
_FILLED_LENGTH = 256


def check(settings: Settings, log: CaseLog) -> None:
    """Compare every engine with the NumPy engine."""
    for model in filter(None, (tiny_model(settings), short_model(settings), wide_model(settings), own_model(settings))):
        for dtype in model.dtypes:
            with open_reference(model, dtype) as reference:
                expected = Expected(model, dtype, reference)
                for subject in SUBJECTS:
                    name = case_name(subject.variant, model, dtype)
                    log.run(name, lambda s=subject, e=expected: e.compare(settings, s), variant=subject.variant)  # type: ignore[misc]
                if model.name == "short":
                    check_stale_rows(settings, log, model, dtype, reference)


class Expected:
    """The steps of a model on the NumPy engine, which every other engine is compared with."""

    def __init__(self, model: CheckedModel, dtype: str, reference: InferenceSession) -> None:
        self._model, self._dtype, self._reference = model, dtype, reference

    @cached_property
    def _logits(self) -> list[tuple[Step, Array]]:
        return [(step, step.run(self._reference)) for step in steps(self._model, self._reference.vocab_size)]

    def compare(self, settings: Settings, subject: Subject) -> dict[str, Any]:
        """Run the steps on another engine; return the worst relative error, and the ties between tokens."""
        tolerance = TOLERANCES[self._dtype]
        errors = {}
        with subject.open(settings, self._model, self._dtype) as session:
            for step, expected in self._logits:
                compared = ~np.isnan(expected).any(axis=1)  # NaN: a slot that got nothing
                errors[step.name] = check_close(step.name, step.run(session)[compared], expected[compared], tolerance)
            prompts = queue_prompts(self._model, session.vocab_size)
            ties = check_greedy("requests in a queue", _run_queue(session, prompts), prompts, self._reference, tolerance)
        worst = max(errors, key=lambda name: errors[name])
        return {"steps": len(errors), "worst_relative_error": float(f"{errors[worst]:.2g}"), "in": worst, "ties": ties}


def steps(model: CheckedModel, vocabulary: int) -> Iterator[Step]:
    """Yield ragged prefill, decode, a second turn, and steps in which one slot is full and idle.

    The prompts differ in length, so a causal mask that is not shifted for each slot would show here.
    """
    random = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in random.integers(3, vocabulary, count)]

    long = min(model.length - 20, model.width + 5)  # two enqueues of prefill
    prompts = [tokens(long), tokens(3), tokens(model.width // 2)]
    yield Step("ragged prefill", lambda session: session.prefill(prompts))
    for number in range(1, 5):  # the third step of an engine may be captured, the fourth is a replay
        one_each = tokens(3)
        yield Step(f"decode {number}", lambda session, given=one_each: session.decode(given))  # type: ignore[misc]
    turns = [tokens(2), tokens(4), tokens(1)]
    yield Step("second turn", lambda session: session.append(turns))
    one_each = tokens(3)
    yield Step("decode after it", lambda session: session.decode(one_each))
    if model.length > _FILLED_LENGTH:
        return
    full = [tokens(model.length), tokens(5), tokens(9)]
    yield Step("prefill of a full slot", lambda session: session.prefill(full))
    for width in (1, 3):
        beside = [[], tokens(width), tokens(width)]
        yield Step(f"{width} new beside a full slot", lambda session, given=beside: session.append(given))  # type: ignore[misc]


def queue_prompts(model: CheckedModel, vocabulary: int) -> list[list[int]]:
    """Return more prompts than slots, of different lengths: a queue compacts the batch and fills free slots while others decode."""
    random = np.random.default_rng(4)
    lengths = [2 + 5 * index % 11 for index in range(model.slots + 3)]
    return [[int(token) for token in random.integers(3, vocabulary, length)] for length in lengths]


def _run_queue(session: InferenceSession, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of each prompt, by a queue."""
    handles = [
        session.submit(prompt, temperature=0.0, repetition_penalty=1.0, max_new_tokens=3 + 2 * (index % 4), ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]
    while session.step():
        pass
    return [list(handle.tokens) for handle in handles]
