"""The recipe ``engines/build_run_compare.py``: it builds, runs and compares, and its exit code says whether the paths agree."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import trt_kvcache
from tests.paths import ROOT
from trt_kvcache import ReferenceRunner

SHIPPED = ROOT / "examples" / "tiny-llama"
RECIPE = ROOT / "engines" / "build_run_compare.py"


def run(monkeypatch: pytest.MonkeyPatch, out: Path) -> object:
    """Run the recipe for the shipped model, and return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(RECIPE), str(SHIPPED), "-o", str(out), "--steps", "2", "--prompt", "Alice was"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(RECIPE), run_name="__main__")
    return ended.value.code


@pytest.mark.trt
@pytest.mark.filterwarnings("ignore::trt_kvcache.session.open_model.EngineFallbackWarning")
def test_the_paths_of_the_shipped_model_agree(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"built {tmp_path / 'out'} with ")
    assert "Alice was| " in printed
    assert printed.endswith("all paths agree\n")


@pytest.mark.trt
@pytest.mark.filterwarnings("ignore::trt_kvcache.session.open_model.EngineFallbackWarning")
def test_a_path_that_differs_ends_with_1(tmp_path, monkeypatch, capsys):
    """The NumPy engine of the comparison computes with another epsilon."""
    other = tmp_path / "other"
    shutil.copytree(SHIPPED, other)
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}), encoding="utf-8")
    models = iter([other, SHIPPED])  # the comparison, then what makes its inputs
    monkeypatch.setattr(trt_kvcache, "ReferenceRunner", lambda model, **options: ReferenceRunner(next(models), **options))
    assert run(monkeypatch, tmp_path / "out") == 1
    assert "the paths differ" in capsys.readouterr().out
