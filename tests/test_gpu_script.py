"""``benchmarks/gpu.py``: its stages run, on the reference engine in the place of TensorRT, and can fail."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from trt_kvcache import InferenceSession


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module("gpu")


@pytest.fixture(scope="module")
def engines(gpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    for attention in ("native", "mask"):
        gpu.build(gpu.TINY, folder / attention, "float32", attention, batch=4)
    return folder


@pytest.mark.trt
def test_all_stages_pass_with_the_reference_engine(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["dry_run"] is True
    assert "device" not in written, "a dry run names no GPU"
    assert len(written["stages"]) >= 20
    assert written["stages"]["engines: accepted"]["ok"]
    assert {"bfloat16 native: logits agree with the reference", "float16 mask: dead rows do not matter"} <= set(written["stages"])


@pytest.mark.trt
def test_a_dead_row_that_is_read_fails_its_stage(gpu, engines):
    report = gpu.Report()
    for name in ("native", "mask"):
        report.run(name, lambda name=name: gpu.dead_rows_do_not_matter(engines / name, "reference", float("nan")))
    assert report.stages["native"]["ok"]
    assert not report.stages["mask"]["ok"], "an explicit mask multiplies NaN with 0"
    assert not report.ok


@pytest.mark.trt
def test_logits_that_differ_fail_their_stage(gpu, engines, monkeypatch):
    real, calls = InferenceSession.decode, []

    def wrong_the_first_time(self, tokens):
        calls.append(tokens)
        return real(self, tokens) * (1.01 if len(calls) == 1 else 1.0)

    monkeypatch.setattr(InferenceSession, "decode", wrong_the_first_time)
    with pytest.raises(AssertionError, match=r"relative error 0\.01 over 0\.005"):
        gpu.logits_agree(engines / "native", "reference", "float32")


def test_nan_is_an_infinite_error(gpu):
    assert gpu.relative_error(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == float("inf")
    assert gpu.relative_error(np.array([1.0, 3.0]), np.array([1.0, 4.0])) == 0.25


def test_without_a_gpu_it_stops_with_one_line(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_gpu", lambda: "there is no driver.")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "no GPU: there is no driver.\n"
    assert not (tmp_path / "gpu.json").exists()
