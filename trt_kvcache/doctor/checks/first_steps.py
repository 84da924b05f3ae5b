"""Seconds of the first steps of a process: check H runs it in two processes, of which the second finds what the first compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trt_kvcache.doctor.cases import CaseLog
from trt_kvcache.doctor.models import CheckedModel, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name


def check(settings: Settings, log: CaseLog) -> None:
    """Time the first steps of every engine."""
    model = wide_model(settings)
    dtype = model.dtypes[0]
    for subject in SUBJECTS:
        name = case_name(subject.variant, model, dtype)
        log.run(name, lambda s=subject: _seconds(settings, s, model, dtype), variant=subject.variant)  # type: ignore[misc]


def _seconds(settings: Settings, subject: Subject, model: CheckedModel, dtype: str) -> dict[str, Any]:
    """Return the seconds of opening, and of each first step of a shape and its repetition."""
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    with subject.open(settings, model, dtype) as session:
        seconds["open"] = time.perf_counter() - started
        one, two = [list(range(3, 3 + 40))], [list(range(3, 3 + 40))] * 2
        first_steps: list[tuple[str, Callable[[], object]]] = [
            ("first prefill", lambda: session.prefill(one)),
            ("the same again", lambda: session.prefill(one)),
            ("another width", lambda: session.prefill([one[0][:23]])),
            ("two slots", lambda: session.prefill(two)),
            ("first decode", lambda: session.decode([5, 6])),
            ("second decode", lambda: session.decode([5, 6])),
            ("third decode", lambda: session.decode([5, 6])),
        ]
        for name, step in first_steps:
            started = time.perf_counter()
            step()
            seconds[name] = time.perf_counter() - started
        started = time.perf_counter()
    seconds["close"] = time.perf_counter() - started
    return {name: round(value, 3) for name, value in seconds.items()}
