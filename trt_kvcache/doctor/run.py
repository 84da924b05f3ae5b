"""A run of ``doctor``: all checks in their order, the report, and the verdict."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trt_kvcache._util.atomic_file import atomic_file, check_target
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.doctor.anonymous import Anonymizer
from trt_kvcache.doctor.cases import MACHINE_CASE
from trt_kvcache.doctor.catalog import CHECKS, Check
from trt_kvcache.doctor.processes import run_in_child
from trt_kvcache.doctor.report import NO_GPU, Report
from trt_kvcache.doctor.results import CheckResult
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.engine.doctor_verdict import DoctorVerdict, write_verdict


def run_doctor(
    *,
    model: Path | None = None,
    full: bool = False,
    dry_run: bool = False,
    flavour: str = "auto",
    device: int = 0,
    output: Path | None = None,
    say: Callable[[str], object],
    checks: Sequence[Check] = CHECKS,
) -> int:
    """Run the checks; ``say`` gets a line for each, then the Markdown text. Returns the exit code.

    ``output`` gets the JSON document, and the Markdown text under the same name with ``.md``. Raises CheckpointError, ConfigError, OSError.
    """
    if model is not None:
        Checkpoint.read_config(model)
    if output is not None:
        check_target(output)
        check_target(output.with_suffix(".md"))
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-doctor-", ignore_cleanup_errors=True) as scratch:
        settings = Settings(
            scratch=scratch,
            model=None if model is None else str(model.absolute()),
            full=full,
            dry_run=dry_run,
            flavour=flavour,
            device=device,
        )
        report = _examine(settings, with_environment(checks), say)
        if report is None:
            return NO_GPU
        say(f"\n{report.markdown()}")
        if output is not None:
            _write(output, report.json())
            _write(output.with_suffix(".md"), report.markdown())
    verdict = verdict_of(report)
    if verdict is not None:
        try:
            write_verdict(verdict)
        except OSError as error:
            say(f"the verdict could not be kept: {error}")
    return report.exit_code


def with_environment(checks: Sequence[Check]) -> Sequence[Check]:
    """Return the checks with the first one, which finds the GPU."""
    return checks if CHECKS[0] in checks else (CHECKS[0], *checks)


def _examine(settings: Settings, checks: Sequence[Check], say: Callable[[str], object]) -> Report | None:
    """Run the checks; None if there is no GPU, which is said."""
    anonymous = Anonymizer([(settings.scratch, "SCRATCH")])
    machine: dict[str, Any] = {}
    results: list[CheckResult] = []
    for check in checks:
        result = run_in_child(check, settings)
        results.append(result)
        for case in result.cases:
            if case.name == MACHINE_CASE:
                machine = case.figures
                if case.status == "not here" and not settings.dry_run:
                    say(f"no GPU: {case.text}")
                    return None
        say(anonymous.clean(result.line) + (" [dry run: no GPU was used]" if settings.dry_run else ""))
        if check.letter == "C":
            settings = settings.changed(left_out=left_out_by(result))
    return Report(settings, machine, results)


def left_out_by(result: CheckResult) -> dict[str, str]:
    """Return what later checks leave out, because check C says that TensorRT or an engine does not run here."""
    refused = [case for case in result.cases if case.status in ("not here", "failed")]
    return {case.name: f"{case.name}: {case.status} in check {result.letter}" for case in refused}


def verdict_of(report: Report) -> DoctorVerdict | None:
    """Return the verdict to keep; None for a dry run, or where some checks or the GPU are missing."""
    machine, statuses = report.machine, report.statuses
    if report.settings.dry_run or "gpu" not in machine or any(check.letter not in statuses for check in CHECKS):
        return None
    return DoctorVerdict(
        gpu=machine["gpu"],
        driver=machine["driver"],
        tensorrt=machine["tensorrt"] or "",
        passed=report.plugin_passed,
        checks=statuses,
        date=report.date,
    )


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def say_on_stdout(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
