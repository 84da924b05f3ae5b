"""``benchmarks/gpu.py``: doctor first, then its own stages; a failed stage stops none."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu")


def run_with(gpu, monkeypatch, out, *, status):
    """Run the script with a doctor that only writes a report, and with stages that fail where this machine has no GPU."""

    def fake(command, **options):
        assert command[1:3] == ["-m", "trt_kvcache.doctor"]
        checks = [{"letter": "B", "title": "kernels", "status": status}]
        Path(command[command.index("-o") + 1]).write_text(json.dumps({"checks": checks}))

    monkeypatch.setattr(gpu.subprocess, "run", fake)
    monkeypatch.setattr(gpu, "find_gpu", lambda: None)
    monkeypatch.setattr(gpu, "describe_environment", lambda *, gpu: {"device": "a GPU"})
    for stage in ("moves_on_the_gpu", "attention_in_a_transformers_model", "attention_on_the_gpu"):
        monkeypatch.setattr(gpu, stage, lambda: {"measured": 1})
    monkeypatch.setattr(gpu, "host_time_of_segments", lambda scratch: {"measured": 1})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out)])
    return gpu.main(), json.loads(out.read_text())


def test_report_of_doctor_is_the_first_stage(gpu, tmp_path, monkeypatch):
    code, written = run_with(gpu, monkeypatch, tmp_path / "gpu.json", status="passed")
    assert code == 0
    assert next(iter(written["stages"])) == "doctor"
    assert written["stages"]["doctor"]["result"]["checks"][0]["letter"] == "B"
    assert written["device"] == "a GPU"


def test_failed_check_of_doctor_fails_and_the_other_stages_run(gpu, tmp_path, monkeypatch):
    code, written = run_with(gpu, monkeypatch, tmp_path / "gpu.json", status="failed")
    assert code == 1
    assert "failed: B kernels" in written["stages"]["doctor"]["result"]
    assert written["stages"]["attention"]["ok"]


def test_without_a_gpu_it_stops_with_one_line(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_gpu", lambda: "there is no driver.")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    assert gpu.main() == 2
    assert capsys.readouterr().err == "no GPU: there is no driver.\n"
    assert not (tmp_path / "gpu.json").exists()
