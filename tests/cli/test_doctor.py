"""``trt-kvcache doctor``: options, exit codes; and its verdict in ``inspect``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine_files import make_engine_folder
from trt_kvcache.cli import doctor as doctor_command, inspect as inspect_command
from trt_kvcache.doctor import __main__ as plain
from trt_kvcache.engine.doctor_verdict import DoctorVerdict, write_verdict

from .conftest import SHIPPED, Run

HERE = ("a GPU, compute capability 8.9, 0123abcd", "580.1, CUDA 13.0")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Record the options of a run, and end it with exit code 1."""
    seen: list[dict[str, object]] = []

    def run_doctor(**options: object) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr(doctor_command, "run_doctor", run_doctor)
    monkeypatch.setattr(plain, "run_doctor", run_doctor)
    return seen


ARGUMENTS = ["model", "--full", "--dry-run", "--checks", "FB", "--flavour", "tensorrt_rtx", "--device", "1", "-o", "doctor.json"]


def test_both_command_lines_take_the_same_options(run: Run, given: list[dict[str, object]]):
    assert run("doctor", *ARGUMENTS).code == 1
    assert plain.main(ARGUMENTS) == 1
    first, second = ({name: value for name, value in options.items() if name != "say"} for options in given)
    assert [check.letter for check in first.pop("checks")] == [check.letter for check in second.pop("checks")] == ["B", "F"]
    assert first == second
    assert first["model"] == Path("model")
    assert (first["full"], first["dry_run"], first["device"], first["flavour"]) == (True, True, 1, "tensorrt_rtx")
    assert first["output"] == Path("doctor.json")


def test_defaults_are_equal_too(run: Run, given: list[dict[str, object]]):
    run("doctor")
    plain.main([])
    first, second = ({name: value for name, value in options.items() if name not in ("say", "checks")} for options in given)
    assert first == second
    assert len(given[0]["checks"]) == len(given[1]["checks"]) == 11


def test_unknown_check_is_wrong_usage(run: Run, given: list[dict[str, object]], capsys: pytest.CaptureFixture[str]):
    done = run("doctor", "--checks", "AZ")
    assert done.code == 2
    assert "expected letters of ABCDEFGHIJK, got 'AZ'" in done.complaint
    with pytest.raises(SystemExit, match="2"):
        plain.main(["--checks", "AZ"])
    assert given == []


def test_without_a_gpu_the_exit_code_is_2():
    command = [sys.executable, "-m", "trt_kvcache.doctor", "--checks", "A"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("no GPU: ")
    assert done.stdout.count("\n") == 1


def test_the_plain_command_needs_no_library_of_the_command_line():
    code = (
        "import sys\nfor name in ('typer', 'rich', 'click'): sys.modules[name] = None\n"
        "from trt_kvcache.doctor.__main__ import main\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--dry-run" in done.stdout


def test_package_imports_neither_tests_nor_benchmarks():
    package = Path(doctor_command.__file__).parents[1] / "doctor"
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert not any(f"{word} {name}" in source for word in ("from", "import") for name in ("tests", "benchmarks")), path


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_engine_folder(SHIPPED, tmp_path / "engine")
    return tmp_path / "engine"


@pytest.mark.parametrize(
    ("passed", "checks", "shown"),
    [(True, {"F": "passed"}, "doctor: passed"), (False, {"F": "failed", "plugin": "failed"}, "doctor: failed: F, plugin")],
)
def test_inspect_shows_the_verdict(
    run: Run, engine: Path, monkeypatch: pytest.MonkeyPatch, passed: bool, checks: dict[str, str], shown: str
):
    monkeypatch.setattr(inspect_command, "gpu_and_driver", lambda: HERE)
    found = json.loads(run("inspect", engine, "--json").out)
    assert found["doctor"] is None
    assert "doctor: did not run with this GPU" in run("inspect", engine).out
    tensorrt = f"{found['tensorrt_flavour']} {found['tensorrt_version']}"
    write_verdict(DoctorVerdict(*HERE, tensorrt, passed, checks, "2026-11-26T10:00:00+00:00"))
    assert shown in run("inspect", engine).out
    assert json.loads(run("inspect", engine, "--json").out)["doctor"]["passed"] is passed


def test_inspect_without_a_gpu_says_nothing_of_it(run: Run, engine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspect_command, "gpu_and_driver", lambda: None)
    assert "doctor:" not in run("inspect", engine).out
