"""Type checkers on a user's script: clean as it is, and they find what is wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / "tests" / "project" / "typed_script.py"
WRONG = """
import trt_kvcache
session = trt_kvcache.load("x", engine="onnx")
session.generate("x", temprature=1.0)
session.generate("x", temperature="hot")
trt_kvcache.load("x", dtype="float64", max_batch_size=2.5)
"""


def mypy(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file", "", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_script_runs():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_mypy_strict_finds_nothing():
    done = mypy(SCRIPT)
    assert [line for line in done.stdout.splitlines() if line.startswith(str(SCRIPT.relative_to(ROOT)))] == []


def test_mypy_finds_wrong_options(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    found = [int(line.split(":")[1]) for line in mypy(script).stdout.splitlines() if line.startswith(str(script)) and "error:" in line]
    assert sorted(set(found)) == [3, 4, 5, 6]


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_nothing():
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "0 errors" in done.stdout, done.stdout + done.stderr
