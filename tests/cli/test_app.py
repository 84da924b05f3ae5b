from __future__ import annotations

import io
import shlex
import signal
import subprocess
import sys
from types import ModuleType

import pytest

from trt_kvcache import __version__
from trt_kvcache.cli import main
from trt_kvcache.errors import ClosedError

from .conftest import GOLDEN, SHIPPED

COMMANDS = ("build", "generate", "chat", "serve-file", "compare", "memory", "inspect")
PROGRAM = "import sys; from trt_kvcache.cli import main; sys.exit(main(sys.argv[1:]))"
REFERENCE = ("--engine", "reference")
CODES = "0 done, 1 failed, 2 wrong usage, 3 compare found a difference, 130 Ctrl-C"


@pytest.fixture
def estimate(monkeypatch):
    """Return a function that replaces what the command ``memory`` calls."""
    return lambda function: monkeypatch.setattr("trt_kvcache.cli.memory.estimate_memory", function)


def test_help_names_every_command_and_the_exit_codes(run):
    for option in ("--help", "-h"):
        done = run(option)
        assert (done.code, CODES in " ".join(done.out.split())) == (0, True)
        assert all(f" {command} " in done.out for command in COMMANDS)


def test_no_command_shows_the_help(run):
    done = run()
    assert done.code in (0, 2), "the one in click before 8.2, the other since"
    assert "Usage: trt-kvcache " in done.out + done.err
    assert " generate " in done.out + done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = run(command, "--help")
    rows = [line.strip("│ ") for line in done.out.splitlines() if line.startswith("│") and "--" in line]
    assert (done.code, bool(rows)) == (0, True)
    for row in rows:
        assert row.split("  ")[-1].strip().endswith((".", "]")), row


def test_version(run):
    assert run("--version").out == f"trt-kvcache {__version__}\n"


@pytest.mark.parametrize(
    ("raised", "code", "complaint"),
    [
        (ClosedError("this [red]thing is closed."), 1, "error: this [red]thing is closed."),
        (PermissionError(13, "Permission denied", "/a/folder"), 1, "error: [Errno 13] Permission denied: '/a/folder'"),
        (MemoryError("Unable to allocate 3 TiB"), 1, "error: out of memory. Unable to allocate 3 TiB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_a_command_raises_is_one_line(run, estimate, raised, code, complaint):
    def fail(config):
        raise raised

    estimate(fail)
    done = run("memory", SHIPPED)
    assert (done.code, done.out, done.err) == (code, "", f"{complaint}\n")


def test_a_bug_of_ours_is_not_hidden(run, estimate):
    estimate(lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("memory", SHIPPED)


def test_ctrl_c_while_the_command_line_is_being_imported(run, monkeypatch):
    class Importing(ModuleType):
        """Does to an exception that comes from nowhere what the import of an extension module does."""

        def __getattr__(self, name):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("initialization failed") from None
            return lambda arguments: 0

    monkeypatch.setitem(sys.modules, "trt_kvcache.cli.app", Importing("app"))
    done = run("memory")
    assert (done.code, done.err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("rich", "models", ["--help"]),
        ("tokenizers", "models", ["generate", SHIPPED, "-p", "Alice"]),
        ("polygraphy", "polygraphy", ["compare", SHIPPED, "-p", "Alice"]),
    ],
)
def test_a_missing_dependency_is_one_line(module, extra, arguments):
    command = [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{PROGRAM}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"error: {module}")
    assert done.stderr.endswith(f" is not installed. Run: pip install 'trt-kvcache[{extra}]'\n")


def test_a_reader_that_has_had_enough_is_no_error():
    command = [sys.executable, "-c", PROGRAM, "generate", SHIPPED, *REFERENCE, "-p", "Alice", "--max-new-tokens", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["generate", str(SHIPPED), *REFERENCE, "-p", "Café", "--max-new-tokens", "1"], 0, "Caf?", "ReferenceEngine on cpu"),
        (["memory", str(SHIPPED)], 0, "| 0-1 ", ""),
        (["memory", "né"], 1, "", "error: n\\xe9: expected an engine or model folder"),
        (["--help"], 0, "--version", ""),
    ],
)
def test_a_terminal_that_knows_ascii_only(monkeypatch, arguments, code, out, err):
    written = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
    for name, data in written.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(data, encoding="ascii", write_through=True))
    assert main(arguments) == code
    assert out in written["stdout"].getvalue().decode()
    assert err in written["stderr"].getvalue().decode()


@pytest.mark.parametrize(
    ("closed", "arguments", "out"), [("0<&-", ["chat", *REFERENCE], ""), ("1>&-", ["memory"], ""), ("2>&-", ["memory"], "0-1")]
)
def test_a_closed_stream_is_no_error(closed, arguments, out):
    command = shlex.join([sys.executable, "-c", PROGRAM, *arguments, str(SHIPPED)])
    done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert out in done.stdout


def test_names_are_not_markup(run, tmp_path):
    folder = tmp_path / "[red]a[bold] :cat:"
    folder.symlink_to(GOLDEN / "llama")
    assert run("inspect", folder).err.startswith(f"error: {folder}: expected an engine folder")
