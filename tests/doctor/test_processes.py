"""Checks in child processes: a failure is a result, and a crash or a hang ends the child alone."""

import time

import pytest

from tests.paths import ROOT
from trt_kvcache.doctor.catalog import Check
from trt_kvcache.doctor.processes import run_in_child
from trt_kvcache.doctor.settings import Settings

PLANTED = Check("X", "planted", "tests.doctor.planted", 30)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(way, check=PLANTED):
        environment = {"PLANTED": way, "MARKER": str(tmp_path / "marker")}
        return run_in_child(check, Settings(scratch=str(tmp_path), dry_run=True), environment=environment)

    return run


def named(result):
    return {case.name: case for case in result.cases}


def test_cases_come_back(run):
    result = run("passes")
    assert (result.letter, result.status) == ("X", "passed")
    assert [(case.name, case.status) for case in result.cases] == [("first", "passed"), ("second", "passed"), ("third", "passed")]
    assert named(result)["first"].figures == {"number": 1}
    assert named(result)["second"].variant == "mask"


def test_failure_is_a_result_and_later_cases_run(run):
    result = run("fails")
    assert result.status == "failed"
    assert [case.status for case in result.cases] == ["passed", "failed", "passed", "noted"]
    assert "expected 1, got 2" in named(result)["second"].text
    assert "second: expected 1, got 2" in result.line
    assert named(result)["warning"].text == "a warning"


def test_reason_that_a_case_is_not_here_is_told(run):
    result = run("is not here")
    assert result.status == "passed"
    assert "not here: second (no such GPU)" in result.line


def test_crash_fails_its_case_alone(run):
    result = run("crashes")
    assert [(case.name, case.status) for case in result.cases] == [("first", "passed"), ("second", "failed"), ("third", "passed")]
    case = named(result)["second"]
    assert case.text.startswith("its process was ended by SIGABRT")
    assert "planted.py" in case.text, "the stack of the crash"
    assert case.variant == "mask"


def test_check_that_hangs_is_ended_with_its_children(run, tmp_path):
    started = time.monotonic()
    result = run("hangs", PLANTED._replace(limit_seconds=1.5))
    assert time.monotonic() - started < 15
    assert [(case.name, case.status) for case in result.cases] == [("first", "passed"), ("second", "failed")]
    assert "did not end within 1.5 s" in named(result)["second"].text
    time.sleep(3.5)
    assert not (tmp_path / "marker").exists()


def test_module_that_cannot_be_imported_is_a_failure(run):
    result = run("passes", PLANTED._replace(module="tests.doctor.no_such_module"))
    assert [(case.name, case.status) for case in result.cases] == [("process", "failed")]
    assert "no_such_module" in result.cases[0].text


def test_log_of_a_process_that_was_ended_while_it_wrote(tmp_path):
    from trt_kvcache.doctor.cases import CaseLog, read_cases

    path = tmp_path / "cases.jsonl"
    CaseLog(path).run("first", lambda: None)
    with path.open("a") as file:
        file.write('{"begins": "second", "variant": ""}\n{"name": "sec')
    cases, unfinished = read_cases(path)
    assert [case.name for case in cases] == ["first"]
    assert unfinished == ("second", "")
    assert read_cases(tmp_path / "none") == ([], None)
