"""``--part K/N``: the parts of a long run are all of its tests, each once."""

import itertools
import subprocess
import sys

from tests.paths import ROOT


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/session/test_chunks.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def collected(*options: str) -> list[str]:
    return [line for line in run(*options).stdout.splitlines() if "::" in line]


def test_each_test_is_in_one_part():
    parts = [collected("--part", f"{part}/3") for part in (1, 2, 3)]
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(collected())


def test_a_part_that_is_none_is_refused():
    found = run("--part", "4/3")
    assert found.returncode != 0
    assert "expected K/N with K from 1 to N, got 4/3" in found.stderr
