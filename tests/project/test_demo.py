"""``make demo``: what examples/demo.py does, in a folder that looks like a checkout."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from trt_kvcache.session.open_model import why_no_tensorrt

CONTINUED = "\nThe rabbit-hole went straight on like a tunnel for some way"
AGREED = "\nreference and full recomputation agree: logits and live cache rows of a prefill and 16 decode steps\n"


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The demo as a module, run where `examples` is and `out` may be written."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(out):
    return [line.split()[2] for line in out.splitlines() if line.startswith("$ trt-kvcache ")]


@pytest.mark.trt
def test_it_builds_generates_and_compares(demo, capsys):
    assert demo.demo() == 0
    out = capsys.readouterr().out
    assert commands(out) == ["build", "generate", "compare"]
    assert CONTINUED in out
    assert AGREED in out
    assert Path("out/demo-engine/engine.plan").is_file()
    assert ("was built and not run" in out) == (why_no_tensorrt("auto") is not None)
    assert demo.demo() == 0, "again: the engine is replaced"


def test_without_tensorrt_it_says_so_in_one_line_and_still_generates():
    blocked = "import sys; sys.modules['tensorrt'] = sys.modules['tensorrt_rtx'] = None"
    program = f"{blocked}; import runpy; runpy.run_path('examples/demo.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("No engine is built here (TensorRT cannot be used. ")
    assert lines[0].endswith("; the NumPy reference engine generates from the checkpoint.")
    assert lines[2].startswith("$ trt-kvcache generate examples/tiny-llama --prompt 'The rabbit-hole went straight' ")
    assert commands(done.stdout) == ["generate", "compare"]
    assert CONTINUED in done.stdout
    assert AGREED in done.stdout
    assert "was built" not in done.stdout


def test_the_commands_that_it_suggests_exist(demo):
    suggested = [line.split() for line in demo.NEXT.splitlines() if "trt-kvcache" in line]
    assert [words[1] for words in suggested] == ["chat", "serve"]
    assert all((ROOT / words[2] / "config.json").is_file() for words in suggested)


@pytest.mark.parametrize(("fails", "ran"), [("build", 1), ("generate", 2), ("compare", 3)])
def test_it_ends_with_the_exit_code_of_the_step_that_fails(demo, monkeypatch, fails, ran):
    seen = []

    def main(arguments):
        seen.append(arguments[0])
        return 3 if arguments[0] == fails else 0

    monkeypatch.setattr(demo, "load", lambda flavour: None)
    monkeypatch.setattr(demo, "main", main)
    assert demo.demo() == 3
    assert seen == ["build", "generate", "compare"][:ran]
