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


# Large packages behind ours, none of which the script or what it calls shows: reading torch alone takes longer than all the rest.
CONFIG = """
[mypy]
[mypy-torch.*,transformers.*,tensorrt.*,tensorrt_rtx.*,cuda.*,polygraphy.*,onnx.*,gguf.*,matplotlib.*,huggingface_hub.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """Run mypy on a file, with a cache that no other run uses, and return its lines."""
    cache = tmp_path_factory.mktemp("mypy")
    config = cache / "mypy.ini"
    config.write_text(CONFIG)

    def run(path: Path) -> list[str]:
        options = ["--strict", "--no-error-summary", "--config-file", str(config), "--cache-dir", str(cache)]
        done = subprocess.run([sys.executable, "-m", "mypy", *options, str(path)], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.stderr == ""
        assert done.returncode in (0, 1), done.stdout
        return done.stdout.splitlines()

    return run


def test_the_script_runs():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_mypy_strict_finds_nothing(mypy):
    assert [line for line in mypy(SCRIPT) if line.startswith(str(SCRIPT.relative_to(ROOT)))] == []


def test_mypy_finds_wrong_options(mypy, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    found = [int(line.split(":")[1]) for line in mypy(script) if line.startswith(str(script)) and "error:" in line]
    assert sorted(set(found)) == [3, 4, 5, 6]


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_finds_nothing():
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "0 errors" in done.stdout, done.stdout + done.stderr
