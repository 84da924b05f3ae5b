"""The report of ``doctor``: one JSON document, and a Markdown text to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from trt_kvcache._version import __version__
from trt_kvcache.doctor.anonymous import Anonymizer
from trt_kvcache.doctor.cases import SEGMENTS, VARIANTS
from trt_kvcache.doctor.results import CheckResult, status_of
from trt_kvcache.doctor.settings import Settings

PASSED, FAILED, NO_GPU = 0, 1, 2


class Report:
    """The results of all checks."""

    def __init__(self, settings: Settings, machine: dict[str, Any], results: Sequence[CheckResult]) -> None:
        self.settings = settings
        self.machine = machine
        self.results = tuple(results)
        self.date = datetime.now(timezone.utc).isoformat(timespec="seconds")

    @property
    def exit_code(self) -> int:
        """0 if no check failed, else 1."""
        return FAILED if any(result.status == "failed" for result in self.results) else PASSED

    @property
    def plugin_passed(self) -> bool:
        """True if plugin attention ran in one plan and passed, and nothing failed but other attention of TensorRT."""
        failed = {case.variant for result in self.results for case in result.cases if case.status == "failed"}
        return self.statuses["plugin"] == "passed" and failed <= {"native", "mask", SEGMENTS}

    @property
    def statuses(self) -> dict[str, str]:
        """Status of each check by its letter, and of each kind of attention of TensorRT by its name."""
        cases = [case for result in self.results for case in result.cases]
        variants: dict[str, str] = {name: status_of(case for case in cases if case.variant == name) for name in VARIANTS}
        return {**{result.letter: result.status for result in self.results}, **variants}

    def document(self) -> dict[str, Any]:
        """Return the report in the types of JSON, without paths and names of users."""
        document = {
            "trt_kvcache": __version__,
            "date": self.date,
            "dry_run": self.settings.dry_run,
            "full": self.settings.full,
            "own_model": self.settings.model is not None,
            "machine": self.machine,
            "passed": self.exit_code == PASSED,
            "statuses": self.statuses,
            "checks": [
                {
                    "letter": result.letter,
                    "title": result.title,
                    "status": result.status,
                    "seconds": result.seconds,
                    "cases": [{key: value for key, value in asdict(case).items() if value not in ("", {})} for case in result.cases],
                }
                for result in self.results
            ],
        }
        folders = [(self.settings.scratch, "SCRATCH")]
        if self.settings.model is not None:
            folders.append((self.settings.model, "MODEL"))
        cleaned: dict[str, Any] = Anonymizer(folders).clean(document)
        return cleaned

    def json(self) -> str:
        """Return the document as text."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n"

    def markdown(self) -> str:
        """Return the report as Markdown: the machine, a row for each check, and the texts of what failed or was noted."""
        document = self.document()
        shown = [f"{name}: {value}" for name, value in document["machine"].items() if value is not None]
        kind = "dry run, no GPU was used; " if document["dry_run"] else ""
        lines = [f"### trt-kvcache doctor: {'passed' if document['passed'] else 'failed'}", ""]
        lines += [f"{kind}trt_kvcache {document['trt_kvcache']}, {document['date']}", "", *(f"- {line}" for line in shown), ""]
        lines += ["| check | | result | s |", "|---|---|---|---|"]
        for check in document["checks"]:
            lines.append(f"| {check['letter']} | {check['title']} | {check['status']} | {check['seconds']} |")
        variants = ", ".join(f"{name} {document['statuses'][name]}" for name in VARIANTS)
        lines += ["", f"Attention of TensorRT: {variants}."]
        for check in document["checks"]:
            lines += _texts(check)
        return "\n".join(lines) + "\n"


def _texts(check: dict[str, Any]) -> list[str]:
    """Return the lines of a check below the table: figures in one line, failures with all their text, reasons once."""
    lines = []
    reasons: dict[str, list[str]] = {}
    for case in check["cases"]:
        figures = json.dumps(case["figures"], ensure_ascii=False) if case.get("figures") else ""
        first, *more = case.get("text", "").splitlines() or [""]
        if case["status"] == "not here":
            reasons.setdefault(first, []).append(case["name"])
            continue
        if case["status"] == "passed" and not figures:
            continue
        said = ". ".join(filter(None, [first.removesuffix("."), figures]))
        lines.append(f"- **{case['status']}** {case['name']}: {said}")
        if more:
            lines += ["", "      " + "\n      ".join(more), ""]
    lines += [f"- **not here** {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    return [] if not lines else ["", f"**{check['letter']} {check['title']}**", "", *lines]
