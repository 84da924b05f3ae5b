"""The verdict of ``trt-kvcache doctor`` in the user's cache folder."""

import json
import os

import pytest

from trt_kvcache.engine import doctor_verdict
from trt_kvcache.engine.doctor_verdict import DoctorVerdict, gpu_and_driver, read_verdict, write_verdict

VERDICT = DoctorVerdict("a GPU, 8.9", "580.1", "tensorrt_rtx 1.7.1", True, {"A": "passed", "B": "not here"}, "2026-11-26T10:00:00+00:00")
KEY = VERDICT[:3]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trt_kvcache" / "doctor"


def test_written_and_read_back(cache_folder):
    assert read_verdict(*KEY) is None
    write_verdict(VERDICT)
    assert read_verdict(*KEY) == VERDICT
    write_verdict(VERDICT._replace(passed=False))
    assert read_verdict(*KEY) == VERDICT._replace(passed=False)
    assert len(os.listdir(cache_folder)) == 1


@pytest.mark.parametrize("index", range(3))
def test_it_is_for_one_gpu_driver_and_tensorrt(index):
    write_verdict(VERDICT)
    assert read_verdict(*(text + "1" if place == index else text for place, text in enumerate(KEY))) is None


def test_another_release_of_the_package_has_none(monkeypatch):
    write_verdict(VERDICT)
    monkeypatch.setattr(doctor_verdict, "__version__", "99.0")
    assert read_verdict(*KEY) is None


@pytest.mark.parametrize(
    "change", [{"passed": "yes"}, {"checks": []}, {"date": 3}, {"gpu": "another"}, {"more": 1}, {"package": "99.0"}], ids=str
)
def test_changed_file_is_no_verdict(cache_folder, change):
    write_verdict(VERDICT)
    (path,) = cache_folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_verdict(*KEY) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"{}"])
def test_damaged_file_is_no_verdict(cache_folder, content):
    write_verdict(VERDICT)
    (path,) = cache_folder.iterdir()
    path.write_bytes(content)
    assert read_verdict(*KEY) is None


def test_failure_to_write_is_an_error_that_keeps_the_old_verdict(monkeypatch):
    write_verdict(VERDICT)

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_verdict(VERDICT._replace(passed=False))
    assert read_verdict(*KEY) == VERDICT


def test_without_a_gpu_there_is_nothing_to_look_up(monkeypatch):
    monkeypatch.setattr(doctor_verdict, "find_gpu", lambda device: "there is no driver.")
    assert gpu_and_driver() is None
