"""The command at a terminal: a real process on a pseudo-terminal, real signals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import SHIPPED

#: The command, slowed down so that there is time to interrupt it.
SLOW = """
import sys, time
from trt_kvcache.cli import chat, generate, main  # the modules
def slow(put):
    return lambda text: (put(text), time.sleep(0.02))
chat.put, generate.put = slow(chat.put), slow(generate.put)
sys.exit(main(sys.argv[1:]))
"""
PATIENCE_SECONDS = 30
REFERENCE = ("--engine", "reference", "--max-new-tokens", "400")


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        self.process = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until ``text`` was shown since the last line was typed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.shown}"
            if not self._read():
                break
        assert text in self.shown

    def type(self, line: str) -> None:
        self.shown = ""
        os.write(self._master, f"{line}\n".encode())

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def press_ctrl_c_until_it_ends(self) -> None:
        """Press it again where it came just before the process began to wait for a line, which then goes on waiting."""
        for _ in range(PATIENCE_SECONDS):
            self.press_ctrl_c()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                return

    def press_ctrl_d(self) -> None:
        os.write(self._master, b"\x04")

    def end(self) -> int:
        """Read to the end and return the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], PATIENCE_SECONDS)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


def test_a_chat(terminal: Callable[..., Terminal]):
    screen = terminal("chat", str(SHIPPED), *REFERENCE)
    screen.wait_for("Ctrl-C stops an answer.")
    screen.wait_for("> ")
    screen.type("The rabbit-hole went straight")
    screen.wait_for(" on like a tunnel")
    screen.press_ctrl_c()
    screen.wait_for("(stopped)")
    screen.type("/stats")
    screen.wait_for("ReferenceEngine on cpu: prefill 13 tokens")
    screen.type("/undo")
    screen.wait_for("Taken back: The rabbit-hole went straight")
    screen.press_ctrl_d()
    assert screen.end() == 0
    assert "Traceback" not in screen.shown


def test_ctrl_c_at_the_prompt_of_a_chat_ends_it(terminal: Callable[..., Terminal]):
    screen = terminal("chat", str(SHIPPED), *REFERENCE)
    screen.wait_for("> ")
    screen.press_ctrl_c_until_it_ends()
    assert screen.end() == 130
    assert screen.shown.rstrip().endswith("interrupted")


def test_ctrl_c_ends_generate(terminal: Callable[..., Terminal]):
    screen = terminal("generate", str(SHIPPED), *REFERENCE, "-p", "The rabbit-hole went straight")
    screen.wait_for(" on like a tunnel")
    screen.press_ctrl_c()
    assert screen.end() == 130
    assert screen.shown.endswith("\r\ninterrupted\r\n"), "in a line of its own"
    assert "Traceback" not in screen.shown


@pytest.mark.trt
def test_a_build_shows_its_progress(terminal: Callable[..., Terminal], tmp_path: Path):
    screen = terminal("build", str(SHIPPED), "-o", str(tmp_path / "engine"))
    screen.wait_for("build engine")
    assert screen.end() == 0
    assert "%" in screen.shown
    assert "peak memory" in screen.shown
