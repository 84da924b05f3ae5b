"""A build in a process of its own: results, errors, warnings, log; and that nothing is left of it, however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from trt_kvcache.builder.build_engine import BUILDING, WRITING
from trt_kvcache.cli import build_process
from trt_kvcache.cli.build_process import build_in_child
from trt_kvcache.errors import BuildError

from .conftest import SHIPPED
from .stand_in_builders import report_of

PATIENCE_SECONDS = 60
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from trt_kvcache.cli import build_process, main
build_process.BUILDER = "tests.cli.stand_in_builders:" + sys.argv.pop(1)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def build_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that builds with a stand-in of this name."""

    def build(name: str, *, progress: Any = lambda stage, done: None, **options: Any) -> Any:
        monkeypatch.setattr(build_process, "BUILDER", f"tests.cli.stand_in_builders:{name}")
        unexpected = lambda: pytest.fail("no Ctrl-C was pressed")  # noqa: E731
        return build_in_child(SHIPPED, tmp_path / "engine", progress=progress, on_interrupt=unexpected, **options)

    return build


def test_report_progress_and_warnings_come_back(build_with: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    seen: list[tuple[str, float | None]] = []
    with pytest.warns(UserWarning, match="this is a warning"):
        report = build_with("succeed", progress=lambda stage, done: seen.append((stage, done)))
    assert report == report_of(tmp_path / "engine")
    assert seen == [(BUILDING, 0.5), (WRITING, None)]
    assert capfd.readouterr() == ("", "a library that prints on stdout\n"), "which is no result"


def test_an_error_is_the_one_that_was_raised(build_with: Callable[..., Any]):
    with pytest.raises(BuildError, match=r"^refused: \['progress', 'max_batch_size'\]$|^refused: \['max_batch_size', 'progress'\]$"):
        build_with("refuse", max_batch_size=2)


def test_a_defect_shows_where_it_was(build_with: Callable[..., Any]):
    with pytest.raises(ZeroDivisionError, match="a defect") as raised:
        build_with("fail_with_a_defect")
    assert "in fail_with_a_defect" in str(raised.value.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_its_text(build_with: Callable[..., Any]):
    with pytest.raises(RuntimeError, match=r"^TwoArguments: odd error$"):
        build_with("fail_with_what_cannot_be_sent")


@pytest.mark.parametrize(
    ("name", "how"),
    [("crash", "ended by SIGKILL; the machine may be out of memory"), ("exit_early", "ended with exit code 7")],
)
def test_a_child_that_ends_without_a_result_is_an_error(build_with: Callable[..., Any], name: str, how: str):
    with pytest.raises(BuildError, match=f"^the engine could not be built: the building process {how}. Nothing was written.$"):
        build_with(name)


def test_the_log_of_the_child_arrives(build_with: Callable[..., Any], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="trt_kvcache"):
        build_with("write_log")
    assert [(record.name, record.levelname, record.message) for record in caplog.records] == [
        ("trt_kvcache.tensorrt", "INFO", "what TensorRT says")
    ]


class Command:
    """`trt-kvcache build` with a stand-in, in a process of its own."""

    def __init__(self, builder: str, folder: Path) -> None:
        self.folder = folder
        arguments = [sys.executable, "-c", PROGRAM, builder, "build", str(SHIPPED), "-o", str(folder / "engine")]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def wait_for_the_child(self) -> int:
        """Return the id of the building process once it has begun."""
        file = self.folder / "pid"
        _wait_until(file.exists)
        return int(file.read_text())

    def press_ctrl_c(self) -> None:
        """Send SIGINT to all processes of the terminal, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def end(self) -> tuple[int, str]:
        """Return exit code and the rest of stderr."""
        _, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, err


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[str], Command]]:
    started: list[Command] = []

    def start(builder: str) -> Command:
        started.append(Command(builder, tmp_path))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.communicate()


@pytest.mark.parametrize("builder", ["never_report", pytest.param("tensorrt_that_hangs", marks=pytest.mark.trt)])
def test_the_first_ctrl_c_says_what_happens_and_the_second_ends_it(command: Callable[[str], Command], tmp_path: Path, builder: str):
    build = command(builder)
    child = build.wait_for_the_child()
    build.press_ctrl_c()
    assert build.wait_for_line().startswith("Ctrl-C: the build stops when TensorRT next reports")
    assert build.process.poll() is None
    assert _runs(child)
    build.press_ctrl_c()
    assert build.end() == (130, "interrupted\n")
    assert not _runs(child)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.parametrize("builder", ["report_often", pytest.param("tensorrt_that_reports_often", marks=pytest.mark.trt)])
def test_one_ctrl_c_ends_a_build_that_reports(command: Callable[[str], Command], tmp_path: Path, builder: str):
    build = command(builder)
    child = build.wait_for_the_child()
    build.press_ctrl_c()
    code, err = build.end()
    assert (code, err.splitlines()[-1]) == (130, "interrupted")
    assert not _runs(child)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_the_engine_is_written_leaves_no_temporary_folder(command: Callable[[str], Command], tmp_path: Path, presses: int):
    build = command("write_for_long")
    child = build.wait_for_the_child()
    for _ in range(presses):
        build.press_ctrl_c()
    assert build.end()[0] == 130
    assert not _runs(child)
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


@pytest.mark.parametrize("builder", ["never_report", "write_for_long"])
def test_the_child_ends_with_a_parent_that_is_killed(command: Callable[[str], Command], tmp_path: Path, builder: str):
    build = command(builder)
    child = build.wait_for_the_child()
    build.process.kill()
    _wait_until(lambda: not _runs(child))
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def _runs(process: int) -> bool:
    """Tell whether a process is there and not just waiting to be collected."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
