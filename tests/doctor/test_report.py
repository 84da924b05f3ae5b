"""Reports have no paths of files, no names of users and machines."""

import getpass
import json
import platform
import sys
import tempfile
from pathlib import Path

import pytest

from trt_kvcache.doctor.anonymous import Anonymizer
from trt_kvcache.doctor.cases import Case
from trt_kvcache.doctor.report import Report
from trt_kvcache.doctor.results import CheckResult
from trt_kvcache.doctor.settings import Settings


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jdoe"))
    return Anonymizer([("/scratch/run 1", "SCRATCH"), ("/data/models/secret-model", "MODEL")]).clean


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/models/secret-model/config.json: missing", "MODEL/config.json: missing"),
        ("in /scratch/run 1/engine/engine.plan.", "in SCRATCH/engine/engine.plan."),
        ("open /opt/customer/lib/libnvinfer.so.10 failed", "open .../libnvinfer.so.10 failed"),
        ('File "/srv/app/x.py", line 3', 'File ".../x.py", line 3'),
        ("see https://docs.nvidia.com/a/b and 1/2, [1/3]", "see https://docs.nvidia.com/a/b and 1/2, [1/3]"),
        (r"C:\Users\jdoe\model\x.bin", r".../x.bin"),
        (r"D:\work\customer\x.bin is", r".../x.bin is"),
        ("jdoe@secret-host", "NAME@NAME"),
        ("jdoes is not a name", "jdoes is not a name"),
        ("16 tokens/s, float16/bfloat16", "16 tokens/s, float16/bfloat16"),
        ("/home/other/x", "~/x"),
    ],
)
def test_paths_and_names_are_replaced(clean, text, expected):
    assert clean(text) == expected
    assert clean({"a": [text, 3, None]}) == {"a": [expected, 3, None]}


def test_own_folders_are_named_by_their_purpose(clean):
    assert clean(f"{sys.prefix}/lib/x.py") in ("PYTHON/lib/x.py", "PACKAGE/.venv/lib/x.py")
    assert "/" + tempfile.gettempdir().strip("/") + "/" not in clean(f"{tempfile.gettempdir()}/abc/x")


def test_user_without_a_name(monkeypatch):
    def unknown():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert Anonymizer().clean("text") == "text"


def test_document_and_markdown_are_clean(monkeypatch, tmp_path):
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    home = Path.home()
    texts = f"jdoe: {home}/model/a.safetensors, {tmp_path}/engine, /data/customer/x"
    cases = (Case("case", "failed", texts, {"figure": texts}), Case("warning", "noted", texts))
    settings = Settings(scratch=str(tmp_path), model="/data/customer")
    report = Report(settings, {"gpu": "a GPU"}, [CheckResult("A", "environment", cases, 1.0)])
    for text in (report.json(), report.markdown()):
        assert "jdoe" not in text
        assert "customer" not in text
        assert str(tmp_path) not in text
        assert f"{home}/" not in text
    assert json.loads(report.json())["own_model"] is True


def test_markdown_shows_figures_failures_and_notes_but_not_plain_passes():
    cases = (
        Case("plain", "passed"),
        Case("measured", "passed", figures={"ms": 1.5}),
        Case("wrong", "failed", "expected 1, got 2"),
        Case("left", "not here", "no torch"),
        Case("a note", "noted", "NaN is read"),
    )
    text = Report(Settings(scratch="."), {}, [CheckResult("I", "time", cases, 1.0)]).markdown()
    assert "plain" not in text
    for shown in ('measured: {"ms": 1.5}', "wrong: expected 1, got 2", "left: no torch", "a note: NaN is read"):
        assert shown in text


def test_reason_of_many_cases_is_told_once():
    cases = tuple(Case(f"case {number}", "not here", "no TensorRT\nmore") for number in range(20))
    result = CheckResult("E", "IAttention alone", cases, 1.0)
    assert result.line == "E IAttention alone: not here (1.0 s). not here: 20 cases (no TensorRT)"
    text = Report(Settings(scratch="."), {}, [result]).markdown()
    assert text.count("no TensorRT") == 1
    assert "case 0; case 1; " in text


def test_line_of_a_check_is_short():
    cases = tuple(Case(f"case {number}", "failed", f"expected {number}") for number in range(100))
    line = CheckResult("B", "kernels", cases, 1.0).line
    assert len(line) < 400
    assert line.endswith("...")
    assert "case 0: expected 0; case 1: expected 1" in line
