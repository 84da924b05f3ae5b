"""A run of doctor: lines, exit codes, files, verdict."""

import json

import pytest

from tests.paths import ROOT
from trt_kvcache.doctor import run as run_module
from trt_kvcache.doctor.cases import MACHINE_CASE, Case
from trt_kvcache.doctor.catalog import CHECKS, Check
from trt_kvcache.doctor.models import own_model
from trt_kvcache.doctor.report import Report
from trt_kvcache.doctor.results import CheckResult
from trt_kvcache.doctor.run import left_out_by, run_doctor, verdict_of
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.engine import doctor_verdict
from trt_kvcache.engine.doctor_verdict import read_verdict
from trt_kvcache.errors import KVCacheError

PLANTED = Check("X", "planted", "tests.doctor.planted", 30)
MACHINE = {"gpu": "a GPU, compute capability 8.9, 0123abcd", "driver": "580.1, CUDA 13.0", "tensorrt": "tensorrt_rtx 1.7.1"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def fake_results(monkeypatch, *, of_checks=None, machine=MACHINE):
    """Have each check pass with one case, or with the cases given by its letter, without a child process."""
    seen = []

    def result(check, settings):
        seen.append((check.letter, settings))
        cases = (of_checks or {}).get(check.letter, (Case("case", "passed"),))
        if check.letter == "A":
            status = "passed" if machine else "not here"
            cases = (Case(MACHINE_CASE, status, "" if machine else "there is no driver.", machine or {}), *cases)
        return CheckResult(check.letter, check.title, tuple(cases), 0.1)

    monkeypatch.setattr(run_module, "run_in_child", result)
    return seen


def kept(said=MACHINE):
    return read_verdict(said["gpu"], said["driver"], said["tensorrt"])


def test_each_check_is_one_line_and_its_verdict_is_kept(monkeypatch):
    lines = []
    fake_results(monkeypatch, of_checks={"F": (Case("plugin, wide model, float16", "passed", variant="plugin"),)})
    assert run_doctor(say=lines.append) == 0
    assert [line[0] for line in lines[:-1]] == list("ABCDEFGHIJK")
    verdict = kept()
    assert verdict.passed
    assert {verdict.checks[letter] for letter in "ABCDEFGHIJK"} == {"passed"}
    assert [verdict.checks[name] for name in ("native", "mask", "plugin", "segments")] == ["not here", "not here", "passed", "not here"]


@pytest.mark.parametrize(
    ("plugin", "other", "variant", "passed"),
    [
        ("passed", "passed", "native", True),
        ("passed", "failed", "native", True),  # TensorRT's own attention says nothing about ours
        ("passed", "failed", "mask", True),
        ("passed", "failed", "segments", True),  # the other form: auto chooses the one plan
        ("failed", "passed", "segments", False),
        ("passed", "failed", "torch", False),
        ("passed", "failed", "", False),
        ("failed", "passed", "native", False),
        ("not here", "passed", "native", False),
    ],
)
def test_verdict_is_about_plugin_attention(monkeypatch, plugin, other, variant, passed):
    cases = (Case("plugin, wide model, float16", plugin, variant="plugin"), Case("other", other, variant=variant))
    fake_results(monkeypatch, of_checks={"F": cases})
    assert run_doctor(say=lambda line: None) == ("failed" in (plugin, other))
    assert kept().passed is passed


def test_failed_check_is_exit_code_1_and_a_verdict(monkeypatch):
    cases = {"F": (Case("plugin, wide model, float16", "failed", "expected 1, got 2", variant="plugin"), Case("torch", "passed"))}
    fake_results(monkeypatch, of_checks=cases)
    assert run_doctor(say=lambda line: None) == 1
    assert not kept().passed
    assert (kept().checks["F"], kept().checks["plugin"], kept().checks["A"]) == ("failed", "failed", "passed")


def test_gpu_that_tensorrt_refuses_passes_without_a_passed_verdict(monkeypatch):
    fake_results(monkeypatch, of_checks={"C": (Case("TensorRT", "not here", "not on this GPU"),)})
    assert run_doctor(say=lambda line: None) == 0
    assert not kept().passed
    assert kept().checks["C"] == "not here"


def test_without_a_gpu_it_ends_with_one_line(monkeypatch, tmp_path):
    lines = []
    seen = fake_results(monkeypatch, machine=None)
    assert run_doctor(say=lines.append, output=tmp_path / "doctor.json") == 2
    assert lines == ["no GPU: there is no driver."]
    assert [letter for letter, _ in seen] == ["A"]
    assert not (tmp_path / "doctor.json").exists()


def test_some_checks_keep_no_verdict(monkeypatch):
    seen = fake_results(monkeypatch)
    assert run_doctor(say=lambda line: None, checks=[check for check in CHECKS if check.letter in "BF"]) == 0
    assert [letter for letter, _ in seen] == ["A", "B", "F"], "A finds the GPU"
    assert kept() is None


def test_dry_run_keeps_no_verdict_and_says_so_in_each_line(monkeypatch):
    lines = []
    fake_results(monkeypatch)
    assert run_doctor(say=lines.append, dry_run=True) == 0
    assert all("dry run" in line for line in lines)
    assert kept() is None


def test_verdict_that_cannot_be_kept_is_told(monkeypatch):
    lines = []
    fake_results(monkeypatch)

    def full(verdict):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "write_verdict", full)
    assert run_doctor(say=lines.append) == 0
    assert "No space left" in lines[-1]


def test_later_checks_leave_out_what_check_c_refused(monkeypatch):
    cases = (Case("native, wide model, float16", "failed", "MyelinCheckException"), Case("TensorRT", "not here", "not on this GPU"))
    seen = fake_results(monkeypatch, of_checks={"C": cases})
    run_doctor(say=lambda line: None)
    settings = dict(seen)
    assert settings["B"].left_out == {}
    assert set(settings["F"].left_out) == {"native, wide model, float16", "TensorRT"}
    assert settings["F"].left_out["TensorRT"] == "TensorRT: not here in check C"
    assert left_out_by(CheckResult("C", "", (Case("mask, x", "passed"),), 0)) == {}


def test_report_files_are_written_and_equal_what_was_said(monkeypatch, tmp_path):
    lines = []
    fake_results(monkeypatch, of_checks={"B": (Case("kernel", "failed", "expected 1, got 2\nmore"),)})
    assert run_doctor(say=lines.append, output=tmp_path / "doctor.json") == 1
    document = json.loads((tmp_path / "doctor.json").read_text())
    assert document["passed"] is False
    assert document["statuses"]["B"] == "failed"
    assert document["machine"]["gpu"] == MACHINE["gpu"]
    text = (tmp_path / "doctor.md").read_text()
    assert text.strip() == lines[-1].strip()
    assert "| B | kernels of this package | failed | 0.1 |" in text
    assert "expected 1, got 2" in text
    assert "      more" in text


def test_place_that_cannot_be_written_is_told_before_the_checks(monkeypatch, tmp_path):
    seen = fake_results(monkeypatch)
    with pytest.raises(OSError, match="No such file"):
        run_doctor(say=lambda line: None, output=tmp_path / "none" / "doctor.json")
    assert seen == []


@pytest.mark.parametrize(("way", "code"), [("passes", 0), ("fails", 1), ("crashes", 1)])
def test_exit_codes_of_real_children(monkeypatch, way, code):
    lines = []
    monkeypatch.setenv("PLANTED", way)
    monkeypatch.setattr(run_module, "with_environment", lambda checks: checks)
    assert run_doctor(say=lines.append, dry_run=True, checks=[PLANTED]) == code
    assert lines[0].startswith(f"X planted: {'passed' if code == 0 else 'failed'}")


def test_verdict_of_another_release_is_not_read(monkeypatch):
    fake_results(monkeypatch)
    run_doctor(say=lambda line: None)
    monkeypatch.setattr(doctor_verdict, "__version__", "99")
    assert kept() is None


def test_missing_machine_has_no_verdict():
    results = [CheckResult(check.letter, check.title, (Case("process", "failed", "crash"),), 0.1) for check in CHECKS]
    assert verdict_of(Report(Settings(scratch="."), {}, results)) is None


def test_the_page_lists_all_checks_with_their_titles():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| ") and line[3] == " " and line[2].isupper()]
    assert rows == [[f"| {check.letter}", check.title] for check in CHECKS]


def test_folder_that_is_no_model_is_told_before_the_checks(monkeypatch, tmp_path):
    seen = fake_results(monkeypatch)
    with pytest.raises(KVCacheError, match=r"config\.json"):
        run_doctor(say=lambda line: None, model=tmp_path)
    assert seen == []


def test_own_model_is_checked_too(settings):
    assert own_model(settings) is None
    model = own_model(settings.changed(model=str(ROOT / "examples" / "tiny-llama")))
    assert (model.name, model.length, model.dtypes, model.head_dim) == ("own", 512, ("float16",), 16)
