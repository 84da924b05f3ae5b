"""Results of checks. A check has cases, and writes each as it ends, so that those before a crash are not lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trt_kvcache.engine.attention_variants import ATTENTION_VARIANTS

#: ``noted``: a result that decides nothing. ``not here``: it cannot run on this machine, for the reason in the text.
Status = Literal["passed", "failed", "noted", "not here"]

#: Plugin attention with a plan for each segment (``plugin_layers="segments"``), beside ``"plugin"``, which is one plan.
SEGMENTS = "segments"
#: Kinds of attention of TensorRT that are checked.
VARIANTS = (*ATTENTION_VARIANTS, SEGMENTS)

#: Name of the case of check A that finds the GPU; its figures describe the machine.
MACHINE_CASE = "machine"


@dataclass(frozen=True)
class Case:
    """Result of one case of a check."""

    name: str
    status: Status
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    variant: str = ""  # one of VARIANTS, or "torch"
    seconds: float = 0.0


class CheckFailure(Exception):
    """A result that is wrong. The text has what was expected, and what came."""


class NotHere(Exception):
    """A case that cannot run on this machine. The text is the reason."""


class CaseLog:
    """Writes the cases of a check into a file of JSON lines, each when it begins and when it ends."""

    def __init__(self, path: Path, *, skip: Collection[str] = ()) -> None:
        self._path = path
        self._skip = frozenset(skip)
        self.cases: list[Case] = []

    def run(self, name: str, work: Callable[[], dict[str, Any] | None], *, variant: str = "") -> Any:
        """Run a case, and return its figures; None if it failed or was skipped. A failure is recorded as a result."""
        if name in self._skip:
            return None
        self._write({"begins": name, "variant": variant})
        started = time.perf_counter()
        figures: dict[str, Any] | None = None
        status: Status
        try:
            figures = work() or {}
            status, text = "passed", ""
        except NotHere as reason:
            status, text = "not here", str(reason)
        except CheckFailure as failure:
            status, text = "failed", str(failure)
        except Exception as error:  # noqa: BLE001  # of TensorRT, torch, cuda-python or this package: a failure is a result
            status, text = "failed", f"{type(error).__name__}: {error}"
        self.add(Case(name, status, text, figures or {}, variant, round(time.perf_counter() - started, 3)))
        return figures

    def note(self, name: str, text: str, **figures: Any) -> None:
        """Add a case that decides nothing."""
        if name in self._skip:
            return
        self.add(Case(name, "noted", text, figures))

    def not_here(self, name: str, reason: str, *, variant: str = "") -> None:
        """Add a case that cannot run on this machine."""
        if name in self._skip:
            return
        self.add(Case(name, "not here", reason, variant=variant))

    def add(self, case: Case) -> None:
        """Add a case that has ended."""
        self.cases.append(case)
        self._write(asdict(case))

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def read_cases(path: Path) -> tuple[list[Case], tuple[str, str] | None]:
    """Return the cases of a log, and name and variant of the case that had begun and not ended, if any."""
    cases: list[Case] = []
    unfinished: tuple[str, str] | None = None
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            content = json.loads(line)
        except ValueError:  # the process ended while it wrote
            continue
        if "begins" in content:
            unfinished = (content["begins"], content["variant"])
        else:
            cases.append(Case(**content))
            unfinished = None
    return cases, unfinished
