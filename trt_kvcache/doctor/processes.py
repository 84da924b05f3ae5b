"""Checks in child processes: an illegal access, ``std::terminate`` or a hang in a driver ends the child alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from trt_kvcache.doctor.cases import Case, read_cases
from trt_kvcache.doctor.catalog import Check
from trt_kvcache.doctor.results import CheckResult
from trt_kvcache.doctor.settings import Settings

#: Lines of stderr of a child that crashed which its case shows.
_SHOWN_LINES = 12

#: Children of one check that may crash.
_MAX_CRASHES = 6


def run_in_child(check: Check, settings: Settings, *, environment: Mapping[str, str] | None = None, own_group: bool = True) -> CheckResult:
    """Run a check in a child process, and return its cases. A crash, or the end of its time, is a failed case.

    After a crash the cases that are left run in another child. Without a group of its own it ends with the group of this process.
    """
    started = time.perf_counter()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(dir=settings.scratch) as folder:
        errors = Path(folder) / "stderr.txt"
        for attempt in range(_MAX_CRASHES):
            log = Path(folder) / f"cases-{attempt}.jsonl"
            limit = check.limit_seconds - (time.perf_counter() - started)
            ending = _run(check, settings, log, errors, [case.name for case in cases], max(limit, 1.0), environment, own_group)
            finished, unfinished = read_cases(log)
            cases += finished
            if ending is None:
                break
            name, variant = unfinished or ("process", "")
            cases.append(Case(name, "failed", f"{ending.text}{_end_of(errors)}", variant=variant))
            if ending.by_time or unfinished is None:
                break
    return CheckResult(check.letter, check.title, tuple(cases), round(time.perf_counter() - started, 1))


class _Ending(NamedTuple):
    """The bad end of a child process."""

    text: str
    by_time: bool = False


def _run(
    check: Check,
    settings: Settings,
    log: Path,
    errors: Path,
    skip: Sequence[str],
    limit_seconds: float,
    environment: Mapping[str, str] | None,
    own_group: bool,
) -> _Ending | None:
    """Run the child until it ends; None if it ended well."""
    command = [sys.executable, "-m", "trt_kvcache.doctor.child", check.module, str(log)]
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stderr,  # TensorRT prints to both
            stderr=stderr,
            # The caches of compiled kernels of a run are removed with it: each run compiles, and leaves nothing of its engines.
            env={**os.environ, "XDG_CACHE_HOME": str(settings.folder / "cache"), **(environment or {})},
            start_new_session=own_group,  # so that its own children can be ended with it
        )
        try:
            process.communicate(json.dumps({"settings": asdict(settings), "skip": list(skip)}).encode(), timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return _Ending(f"it did not end within {check.limit_seconds:g} s of this check, and its process was ended", by_time=True)
        finally:
            _end(process)
    if process.returncode == 0:
        return None
    if process.returncode < 0:
        with contextlib.suppress(ValueError):
            return _Ending(f"its process was ended by {signal.Signals(-process.returncode).name}")
    return _Ending(f"its process ended with exit code {process.returncode}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and its children; nothing if it has ended."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _end_of(errors: Path) -> str:
    lines = [line for line in errors.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "".join(f"\n{line}" for line in lines[-_SHOWN_LINES:])
