"""What :data:`trt_kvcache.cli.build_process.BUILDER` may name in a test. They run in the building process."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from trt_kvcache._util.atomic_folder import atomic_folder
from trt_kvcache.builder.build_engine import BUILDING, WRITING, BuildReport, build_engine
from trt_kvcache.errors import BuildError

FOREVER_SECONDS = 600


def report_of(target: Path) -> BuildReport:
    return BuildReport(
        path=target,
        tensorrt="stand-in 1.0",
        seconds=1.0,
        peak_memory_nbytes=None,
        plan_nbytes=2,
        weights_nbytes=1,
        attention=(),
        warnings=(),
    )


def succeed(model: Path, target: Path, *, progress: Any, **options: Any) -> BuildReport:
    print("a library that prints on stdout", flush=True)
    warnings.warn("this is a warning", UserWarning, stacklevel=1)
    progress(BUILDING, 0.5)
    progress(WRITING, None)
    return report_of(target)


def refuse(model: Path, target: Path, **options: Any) -> NoReturn:
    raise BuildError(f"refused: {sorted(options)}")


def fail_with_a_defect(model: Path, target: Path, **options: Any) -> NoReturn:
    raise ZeroDivisionError("a defect")


class TwoArguments(Exception):
    """Cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def fail_with_what_cannot_be_sent(model: Path, target: Path, **options: Any) -> NoReturn:
    raise TwoArguments("odd ", "error")


def crash(model: Path, target: Path, **options: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def exit_early(model: Path, target: Path, **options: Any) -> NoReturn:
    os._exit(7)


def _announce(target: Path) -> None:
    """Say in a file beside the target which process this is."""
    target.with_name("pid.new").write_text(str(os.getpid()))
    target.with_name("pid.new").rename(target.with_name("pid"))


def never_report(model: Path, target: Path, *, progress: Any, **options: Any) -> None:
    """As TensorRT between two reports."""
    progress(BUILDING, 0.5)
    _announce(target)
    time.sleep(FOREVER_SECONDS)


def report_often(model: Path, target: Path, *, progress: Any, **options: Any) -> None:
    _announce(target)
    while True:
        progress(BUILDING, 0.5)
        time.sleep(0.01)


def write_for_long(model: Path, target: Path, *, progress: Any, **options: Any) -> None:
    progress(WRITING, None)
    with atomic_folder(target) as folder:
        (folder / "engine.plan").write_text("half")
        _announce(target)
        while True:
            time.sleep(0.01)


def write_log(model: Path, target: Path, *, progress: Any, **options: Any) -> BuildReport:
    logging.getLogger("trt_kvcache.tensorrt").info("what %s says", "TensorRT")
    return report_of(target)


def tensorrt_that_hangs(model: Path, target: Path, *, progress: Any, **options: Any) -> None:
    """Build with TensorRT, which does not come back from its second report."""
    _build_with_tensorrt(model, target, options, lambda stage, done: never_report(model, target, progress=progress))


def tensorrt_that_reports_often(model: Path, target: Path, *, progress: Any, **options: Any) -> None:
    """Build with TensorRT, slowed down so that there is time to interrupt it."""
    _build_with_tensorrt(model, target, options, lambda stage, done: report_often(model, target, progress=progress))


def _build_with_tensorrt(model: Path, target: Path, options: dict[str, Any], in_tensorrt: Any) -> None:
    """Build, and call a function within TensorRT."""

    def report(stage: str, done: float | None) -> None:
        if stage == BUILDING and done:
            in_tensorrt(stage, done)

    build_engine(model, target, progress=report, **options)
