"""Makefile: what its targets would run, on a fresh checkout and on one that is set up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TARGETS = ("help", "demo", "check", "test", "test-slow", "test-trt", "test-gpu", "plugins", "engines", "bench", "clean")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def ready(checkout: Path) -> Path:
    """A checkout whose environment is newer than what it was made from."""
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".ready").touch()
    os.utime(checkout / "pyproject.toml", (0, 0))
    return checkout


def make(folder: Path, *arguments: str) -> str:
    """Run make as from a shell, even if these tests were started by one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")}
    command = ["make", "-C", str(folder), "--no-print-directory", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_is_the_default_and_names_every_target(checkout: Path):
    shown = make(checkout)
    assert shown == make(checkout, "help")
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == list(TARGETS)
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_fresh_checkout_is_set_up_first(checkout: Path, target: str):
    lines = make(checkout, "-n", target).splitlines()
    made = next(index for index, line in enumerate(lines) if "python3 -m venv .venv" in line)
    installed = next(index for index, line in enumerate(lines) if '--editable ".[dev,rtx,cuda]"' in line)
    last = "examples/demo.py" if target == "demo" else "pytest"
    assert made < installed < next(index for index, line in enumerate(lines) if line.startswith(".venv/bin/") and last in line)


def test_another_python_can_be_named(checkout: Path):
    assert "python3.10 -m venv .venv" in make(checkout, "-n", "demo", "PYTHON=python3.10")


@pytest.mark.parametrize("target", TARGETS[1:-1])
def test_a_checkout_that_is_set_up_is_not_set_up_again(ready: Path, target: str):
    lines = make(ready, "-n", target).splitlines()
    assert lines
    assert not any("pip" in line or "venv .venv" in line for line in lines)


def test_a_changed_pyproject_sets_it_up_again(ready: Path):
    os.utime(ready / "pyproject.toml")
    os.utime(ready / ".venv" / ".ready", (0, 0))
    assert '--editable ".[dev,rtx,cuda]"' in make(ready, "-n", "demo")


def test_the_extras_that_are_installed_exist(ready: Path):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert {"dev", "rtx", "cuda"} <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


@pytest.mark.parametrize("target", TARGETS[1:-1])
def test_what_a_target_runs_is_there(ready: Path, target: str):
    commands = make(ready, "-n", target)
    for name in re.findall(r"(?<=python )[\w/]+\.py", commands):
        assert (ROOT / name).is_file(), name
    for module in re.findall(r"(?<=python -m )[\w.]+", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for folder in re.findall(r"trt-kvcache build (\S+)", commands):
        assert (ROOT / folder / "config.json").is_file(), folder


def test_tests_are_chosen_by_marker(ready: Path):
    assert '-m "not trt and not gpu and not slow"' in make(ready, "-n", "test")
    assert '-m "trt and not gpu"' in make(ready, "-n", "test-trt")
    assert '-m "slow and not trt and not gpu"' in make(ready, "-n", "test-slow")
    assert "TRT_KVCACHE_REQUIRE_GPU=1" in make(ready, "-n", "test-gpu")


def test_clean_removes_what_was_made_and_nothing_else(ready: Path):
    removed = set(make(ready, "-n", "clean").split()[2:])
    assert {".venv", "build", "dist", "out"} <= removed
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert removed <= {line.strip("/") for line in ignored}
