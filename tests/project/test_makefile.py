"""Makefile: what its targets would run, on a fresh checkout and on one that is set up."""

import os
import re
import shutil
import subprocess

import pytest

from tests.paths import ROOT

TARGETS = (
    "help",
    "demo",
    "check",
    "test",
    "test-cpus",
    "coverage",
    "test-long",
    "test-slow",
    "test-trt",
    "test-bindings",
    "test-gpu",
    "test-torch",
    "test-serve",
    "test-ray",
    "test-real",
    "test-all",
    "docs",
    "plugins",
    "plugin-library",
    "engines",
    "bench",
    "bench-llama",
    "clean",
)
CHOSEN = {
    "test": '-m "not trt and not gpu and not slow and not long and not real"',
    "test-real": "TRT_KVCACHE_REQUIRE_REAL=1",
    "test-long": '-m "long and not trt and not gpu and not slow"',
    "test-trt": '-m "trt and not gpu and not slow and not real"',
    "test-slow": '-m "slow and not gpu"',
    "test-gpu": "TRT_KVCACHE_REQUIRE_GPU=1",
    "test-torch": "TRT_KVCACHE_REQUIRE_TORCH=1",
    "test-ray": "TRT_KVCACHE_REQUIRE_RAY=1",
    "test-serve": "TRT_KVCACHE_REQUIRE_SERVE=1",
}


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def ready(checkout):
    """A checkout whose environment, torch and transformers too, is newer than what it was made from."""
    (checkout / ".venv").mkdir()
    for name in (".ready", ".demo", ".torch", ".transformers", ".serve", ".ray", ".real", ".llama"):
        (checkout / ".venv" / name).touch()
    os.utime(checkout / "pyproject.toml", (0, 0))
    return checkout


def make(folder, *arguments):
    """Run make as from a shell, even if these tests were started by one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")}
    command = ["make", "-C", str(folder), "--no-print-directory", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_is_the_default_and_names_every_target(checkout):
    shown = make(checkout)
    assert shown == make(checkout, "help")
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == list(TARGETS)
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("target", "extras", "last"), [("demo", "rtx,polygraphy,serve", "examples/demo.py"), ("test", "dev,rtx,cuda", "pytest")]
)
def test_a_fresh_checkout_is_set_up_first(checkout, target, extras, last):
    steps = rf'python3 -m venv \.venv.*--editable "\.\[{extras}\]".*^\.venv/bin/[^\n]*{last}'
    assert re.search(steps, make(checkout, "-n", target), re.DOTALL | re.MULTILINE)
    assert "python3.10 -m venv .venv" in make(checkout, "-n", target, "PYTHON=python3.10")


@pytest.mark.parametrize("target", TARGETS[1:-1])
def test_a_target_of_a_checkout_that_is_set_up_runs_what_is_there_and_no_more(ready, target):
    commands = make(ready, "-n", target)
    assert commands
    assert not re.search(r"pip|venv \.venv", commands)
    assert CHOSEN.get(target, "") in commands
    files = re.findall(r"(?<=python )[\w/]+\.py", commands)
    files += [f"{module.replace('.', '/')}.py" for module in re.findall(r"(?<=python -m )[\w.]+", commands)]
    files += [f"{folder}/config.json" for folder in re.findall(r"trt-kvcache build (\S+)", commands)]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert [path for path in re.findall(r"--ignore[ =](\S+)", commands) if not (ROOT / path).exists()] == []


def test_ci_runs_one_of_each_kind_and_test_all_everything(ready):
    few, every = (make(ready, "-n", *targets) for targets in (("test-cpus", "test-bindings"), ("test-all",)))
    assert "--all-releases" not in few
    assert "tests/session" not in few
    assert "tests/bindings/run.py --all-releases" in every
    assert re.search(r"tests/cpus/run\.py .*tests/session", every)
    assert [target for target in CHOSEN if target != "test-gpu" and CHOSEN[target] not in every] == []


def test_the_processes_that_tests_start_may_keep_their_bytecode(ready, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert make(ready, '--eval=show: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"', "show") == "[]\n"
