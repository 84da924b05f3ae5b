import os
import subprocess
import sys

import pytest

from trt_kvcache import __version__
from trt_kvcache.errors import ClosedError
from trt_kvcache.session.session import InferenceSession

from .conftest import SHIPPED

COMMANDS = ("build", "generate", "chat", "serve-file", "compare", "memory", "inspect")
PROGRAM = "import sys; from trt_kvcache.cli import main; sys.exit(main(sys.argv[1:]))"
REFERENCE = ("--engine", "reference")
CODES = "0 done, 1 failed, 2 wrong usage, 3 compare found a difference, 130 Ctrl-C"


def test_help_names_every_command_and_the_exit_codes(run):
    assert run("--version").out == f"trt-kvcache {__version__}\n"
    for option in ("--help", "-h"):
        done = run(option)
        assert (done.code, CODES in " ".join(done.out.split())) == (0, True)
        assert all(f" {command} " in done.out for command in COMMANDS)


@pytest.mark.parametrize(
    ("raised", "code", "complaint"),
    [(ClosedError("this [red]thing is closed."), 1, "error: this [red]thing is closed."), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_what_a_command_raises_is_one_line(run, monkeypatch, raised, code, complaint):
    def fail(config):
        raise raised

    monkeypatch.setattr("trt_kvcache.cli.memory.estimate_memory", fail)
    done = run("memory", SHIPPED)
    assert (done.code, done.out, done.err) == (code, "", f"{complaint}\n")


@pytest.mark.parametrize("command", [("generate", "-p", "A"), ("chat",), ("serve-file", SHIPPED / "config.json", "-o", os.devnull)])
def test_cuda_graphs_are_a_switch(run, monkeypatch, command):
    def refuse(folder, **options):
        raise ClosedError(f"{options['cuda_graphs']}")

    monkeypatch.setattr(InferenceSession, "from_model", refuse)
    for switches, wanted in ([], True), (["--no-cuda-graphs"], False):
        assert run(command[0], SHIPPED, *command[1:], *switches).err == f"error: {wanted}\n"


@pytest.mark.parametrize(("module", "arguments"), [("rich", ["--help"]), ("tokenizers", ["generate", SHIPPED, "-p", "Alice"])])
def test_a_missing_dependency_is_one_line(module, arguments):
    command = [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{PROGRAM}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {module}")
    assert done.stderr.endswith(" is not installed. Run: pip install 'trt-kvcache[models]'\n")


def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-c", PROGRAM, "generate", SHIPPED, *REFERENCE, "-p", "Alice", "--max-new-tokens", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
