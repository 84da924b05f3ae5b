"""``benchmarks/gpu.py``: its stages run, on the reference engine in the place of TensorRT."""

import importlib
import json
import sys

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu")


@pytest.mark.trt
def test_all_stages_pass_with_the_reference_engine(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["dry_run"] is True
    assert "device" not in written, "a dry run names no GPU"
    assert len(written["stages"]) >= 20
    assert written["stages"]["engines: accepted"]["ok"]
    assert {"bfloat16 plugin: logits agree with the reference", "float16 plugin: dead rows do not matter"} <= set(written["stages"])


def test_without_a_gpu_it_stops_with_one_line(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_gpu", lambda: "there is no driver.")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "no GPU: there is no driver.\n"
    assert not (tmp_path / "gpu.json").exists()
