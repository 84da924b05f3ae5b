from __future__ import annotations

import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from typer.main import get_command

from trt_kvcache import __version__
from trt_kvcache.cli import main
from trt_kvcache.cli.app import app
from trt_kvcache.errors import ClosedError
from trt_kvcache.session.session import InferenceSession

from .conftest import GOLDEN, SHIPPED, Run

COMMANDS = ("build", "generate", "chat", "serve-file", "score", "compare", "memory", "inspect", "doctor")
PROGRAM = "import sys; from trt_kvcache.cli import main; sys.exit(main(sys.argv[1:]))"

#: The same, but so slow that it does not end before the reader of its output.
SLOW = """
import sys, time
from trt_kvcache.cli import generate, main
put = generate.put
generate.put = lambda text: (put(text), time.sleep(0.2))
sys.exit(main(sys.argv[1:]))
"""


def test_help_names_every_command_and_the_exit_codes(run: Run):
    for option in ("--help", "-h"):
        done = run(option)
        assert done.code == 0
        assert all(f" {command} " in done.out for command in COMMANDS)
        assert "0 done, 1 failed, 2 wrong usage, 3 compare found a difference, 130 Ctrl-C" in " ".join(done.out.split())


def test_no_command_shows_the_help(run: Run):
    done = run()
    assert done.code in (0, 2), "the one in click before 8.2, the other since"
    assert "Usage: trt-kvcache " in done.out + done.err
    assert " generate " in done.out + done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text_and_a_short_name_for_its_value(command: str):
    options = [parameter for parameter in get_command(app).commands[command].params if parameter.param_type_name == "option"]
    assert len(options) >= 3
    for option in options:
        assert option.help.endswith((".", "]")), option.name
        assert option.is_flag or option.count or option.metavar, option.name


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_80_columns(run: Run, command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    done = run(command, "--help")
    assert max(len(line) for line in done.out.splitlines()) <= 80
    names = {name for parameter in get_command(app).commands[command].params for name in parameter.opts if name.startswith("-")}
    assert names <= set(re.split(r"[\s,]+", done.out)), "no name is cut"
    assert "…" not in done.out
    assert not re.search("<[a-z]", done.out), "no types of Python"


def test_the_list_of_commands_is_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = run("--help").out.partition("Commands:")[2].partition("Exit codes")[0]
    assert "..." not in listed


def test_quiet_and_verbose_contradict_each_other(run: Run):
    done = run("memory", SHIPPED, "-q", "-v")
    assert (done.code, done.out) == (2, "")
    assert "expected --quiet or --verbose, got both." in done.complaint


def test_quiet_leaves_out_notes_and_warnings(run: Run, without_gpu: None):
    done = run("generate", SHIPPED, "-q", "-p", "Alice", "--max-new-tokens", 2)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Alice")


def test_quiet_keeps_errors(run: Run):
    assert run("memory", "no/such/folder", "-q").err.startswith("error: no/such/folder: ")


@pytest.mark.parametrize(("switch", "shown"), [([], "w"), (["-v"], "iw"), (["-vv"], "diw"), (["-q"], "")])
def test_verbose_shows_the_log(run: Run, monkeypatch: pytest.MonkeyPatch, switch: list[str], shown: str):
    before = list(logging.getLogger("trt_kvcache").handlers)

    def log(config: object) -> NoReturn:
        logger = logging.getLogger("trt_kvcache.part")
        logger.debug("d"), logger.info("i"), logger.warning("w")
        raise ClosedError("end")

    monkeypatch.setattr("trt_kvcache.cli.memory.estimate_memory", log)
    done = run("memory", SHIPPED, *switch)
    assert done.err == "".join(f"trt_kvcache.part: {text}\n" for text in shown) + "error: end\n"
    assert logging.getLogger("trt_kvcache").handlers == before


def test_version(run: Run):
    assert run("--version").out == f"trt-kvcache {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bogus"], "No such command 'bogus'."),
        (["--bogus"], "No such option: --bogus"),
        (["generate", SHIPPED, "--bogus"], "No such option: --bogus"),
        (["generate"], "Missing argument 'ENGINE|MODEL'."),
        (["build", SHIPPED], "Missing option '--output' / '-o'."),
        (
            ["generate", SHIPPED, "-p", "A", "--engine", "gpu"],
            "Invalid value for '--engine': expected one of auto, numpy, tensorrt, torch, got 'gpu'.",
        ),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str], complaint: str):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.complaint


@pytest.mark.parametrize(
    ("raised", "code", "complaint"),
    [
        (ClosedError("this [red]thing is closed."), 1, "error: this [red]thing is closed."),
        (PermissionError(13, "Permission denied", "/a/folder"), 1, "error: /a/folder: Permission denied."),
        (OSError(28, "No space left on device"), 1, "error: No space left on device."),
        (OSError("a message alone"), 1, "error: a message alone"),
        (MemoryError("Unable to allocate 3 TiB"), 1, "error: out of memory. Unable to allocate 3 TiB"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_command_raises_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, complaint: str):
    def fail(config: object) -> None:
        raise raised

    monkeypatch.setattr("trt_kvcache.cli.memory.estimate_memory", fail)
    done = run("memory", SHIPPED)
    assert (done.code, done.out, done.err) == (code, "", f"{complaint}\n")


def test_an_unexpected_error_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trt_kvcache.cli.memory.estimate_memory", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("memory", SHIPPED)


def test_ctrl_c_during_the_imports_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch):
    class Importing(ModuleType):
        """Does to an exception that comes from nowhere what the import of an extension module does."""

        def __getattr__(self, name: str) -> object:
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
        ("tokenizers", "models", ["generate", str(SHIPPED), "--engine", "reference", "-p", "Alice"]),
        ("polygraphy", "polygraphy", ["compare", str(SHIPPED), "-p", "Alice"]),
    ],
)
def test_a_missing_dependency_is_one_line(module: str, extra: str, arguments: list[str]):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{PROGRAM}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (1, "", 1)
    assert lines[0].startswith(f"error: {module}")
    assert lines[0].endswith(f" is not installed. Run: pip install 'trt-kvcache[{extra}]'")


def test_a_closed_pipe_is_no_error():
    arguments = ["generate", SHIPPED, "--engine", "reference", "-p", "Alice", "--max-new-tokens", "300"]
    with subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"Alice"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["generate", str(SHIPPED), "--engine", "reference", "-p", "Café", "--max-new-tokens", "1"], 0, "Caf?", "ReferenceEngine on cpu"),
        (["memory", str(SHIPPED)], 0, "| 0-1 ", ""),
        (["memory", "né"], 1, "", "error: n\\xe9: expected a model folder, an engine folder"),
        (["--help"], 0, "--version", ""),
    ],
)
def test_output_to_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, out: str, err: str):
    written = []
    for name in ("stdout", "stderr"):
        written.append(io.BytesIO())
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written[-1], encoding="ascii", write_through=True))
    assert main(arguments) == code
    assert out in written[0].getvalue().decode()
    assert err in written[1].getvalue().decode()


@pytest.mark.parametrize(
    ("closed", "arguments", "out"),
    [("0<&-", ["chat", "--engine", "reference"], ""), ("1>&-", ["memory"], ""), ("2>&-", ["memory"], "0-1")],
)
def test_a_closed_stream_is_no_error(closed: str, arguments: list[str], out: str):
    command = shlex.join([sys.executable, "-c", PROGRAM, *arguments, str(SHIPPED)])
    done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert out in done.stdout


def test_brackets_in_names_are_not_markup(run: Run, tmp_path: Path):
    folder = tmp_path / "[red]a[bold] :cat:"
    folder.symlink_to(GOLDEN / "llama")
    assert run("inspect", folder).err.startswith(f"error: {folder}: expected an engine folder")


@pytest.mark.parametrize("command", [("generate", "-p", "A"), ("chat",), ("serve-file", SHIPPED / "config.json", "-o", os.devnull)])
@pytest.mark.parametrize(("switches", "expected"), [([], True), (["--no-cuda-graphs"], False)], ids=["on", "off"])
def test_cuda_graphs_are_a_switch(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], switches: list[str], expected: bool
):
    def refuse(folder: object, **options: object) -> None:
        raise ClosedError(f"{options['cuda_graphs']}")

    monkeypatch.setattr(InferenceSession, "from_model", refuse)
    assert run(command[0], SHIPPED, *command[1:], *switches).err == f"error: {expected}\n"
