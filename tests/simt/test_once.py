"""What several processes of a run build is built once, and nobody sees half of it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.simt import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator is made for Linux")

PROGRAM = """
import sys, time
from pathlib import Path
from tests.simt import run
run.REPOSITORY = Path(sys.argv[1])

def make(folder):
    (folder / "first").write_text("1")
    time.sleep(0.2)
    (folder / "second").write_text("2")
    with (run.REPOSITORY / "made").open("a") as log:
        log.write("x")

print(*sorted(path.name for path in run.once("device", [run.HERE / "run.py"], make).iterdir()))
"""


def test_processes_that_ask_at_once_get_one_whole_folder(tmp_path: Path) -> None:
    def ask(_: int) -> str:
        return subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, text=True, cwd=ROOT).stdout

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, range(3))) == ["first second\n"] * 3
    assert (tmp_path / "made").read_text() == "x"


def test_threads_build_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    made: list[Path] = []
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: run.once("device", [run.HERE / "run.py"], made.append), range(4)))
    assert (len(folders), len(made)) == (1, 1)


def test_what_was_left_half_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        run.once("device", [run.HERE / "run.py"], fail)
    folder = run.once("device", [run.HERE / "run.py"], lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
