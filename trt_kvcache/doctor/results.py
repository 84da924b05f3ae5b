"""``CheckResult``: the cases of a check, and the line that is printed of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trt_kvcache.doctor.cases import Case

_MAX_LINE, _MAX_NAMES = 300, 2


class CheckResult(NamedTuple):
    """Result of one check."""

    letter: str
    title: str
    cases: tuple[Case, ...]
    seconds: float

    @property
    def status(self) -> str:
        """``failed`` if a case failed, ``passed`` if one passed, else ``not here``."""
        return status_of(self.cases)

    @property
    def line(self) -> str:
        """The check in one line: the failures, or the number of cases, and the reasons of the cases that are not here."""
        of_status = {status: [case for case in self.cases if case.status == status] for status in ("passed", "failed", "not here")}
        parts = [f"{case.name}: {first_line(case.text)}" for case in of_status["failed"]]
        if of_status["passed"]:
            parts.append(f"{len(of_status['passed'])} passed")
        for reason, names in by_reason(of_status["not here"]).items():
            shown = ", ".join(names) if len(names) <= _MAX_NAMES else f"{len(names)} cases"
            parts.append(f"not here: {shown} ({reason})")
        text = "; ".join(parts)
        return f"{self.letter} {self.title}: {self.status} ({self.seconds} s). {text[:_MAX_LINE]}{'...' if len(text) > _MAX_LINE else ''}"


def status_of(cases: Iterable[Case]) -> str:
    """Return ``failed`` if a case failed, ``passed`` if one passed, else ``not here``."""
    statuses = {case.status for case in cases}
    return next((status for status in ("failed", "passed") if status in statuses), "not here")


def by_reason(cases: Iterable[Case]) -> dict[str, list[str]]:
    """Return the names of cases by the first lines of their texts."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        reasons.setdefault(first_line(case.text), []).append(case.name)
    return reasons


def first_line(text: str) -> str:
    """Return the first line of a text."""
    return text.partition("\n")[0]
