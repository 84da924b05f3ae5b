from __future__ import annotations

import io
import re
import sys

import pytest

from trt_kvcache.builder.build_engine import BUILDING, DEFINING
from trt_kvcache.cli import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_size(nbytes: int, text: str):
    assert console.size(nbytes) == text


def test_count():
    assert [console.count(number, "slot") for number in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]


def test_span():
    assert (console.span(3, 3), console.span(3, 7)) == ("3", "3-7")


def test_results_go_to_stdout_and_everything_else_to_stderr(capsys: pytest.CaptureFixture[str]):
    console.say("a result")
    console.put("text")
    console.note("a note")
    console.warn("a danger")
    console.complain("error:", "a failure")
    written = capsys.readouterr()
    assert written.out == "a result\ntext"
    assert written.err == "a note\nwarning: a danger\nerror: a failure\n"


def test_lines_in_a_pipe_are_not_wrapped(capsys: pytest.CaptureFixture[str]):
    line = "word " * 100 + "end"
    console.say(line)
    assert capsys.readouterr().out == f"{line}\n"


def test_lines_on_a_terminal_are_wrapped_between_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    console.note("seven letters here")
    assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).split("\n") == ["seven ", "letters here", ""]


def test_cells_of_a_table_are_not_markup(capsys: pytest.CaptureFixture[str]):
    rows = console.table("name", "bytes", numbers=("bytes",))
    rows.add_row("[red]a :cat:", "7")
    rows.add_row("b", "1234567")
    console.results().print(rows)
    out = capsys.readouterr().out
    assert "│ [red]a :cat: │       7 │" in out


def test_progress_writes_nothing_to_a_pipe(capsys: pytest.CaptureFixture[str]):
    with console.progress_bar() as report:
        report("a stage", 0.5)
    assert capsys.readouterr() == ("", "")


def test_progress_shows_stages_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with console.progress_bar() as report:
        report(DEFINING, None)
        report(BUILDING, 0.25)
        live = sys.stderr
    assert live is not terminal, "rich shows bars while it redirects stderr"
    shown = terminal.getvalue()
    assert DEFINING in shown
    assert BUILDING in shown
    assert "100%" in shown, "a stage is done when the next one begins"
    assert " 25%" in shown
