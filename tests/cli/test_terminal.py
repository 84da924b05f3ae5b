"""The command at a terminal: a real process on a pseudo-terminal, real signals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import SHIPPED

#: Makes stdin the terminal of the process, whose keys send it signals.
OF_THE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"

#: The command, which stops behind the first " tunnel" that it generates until it is interrupted.
HELD = """
import sys, time
from trt_kvcache.cli import chat, generate, main  # the modules
said = ""
def held(put):
    def put_and_wait(text):
        global said
        said += text
        stops = " tunnel" in said
        said = "" if stops else said  # once: what is put behind an interrupt is not held
        put(text)
        for _ in range(60_000 * stops):  # not one long sleep: a signal just before it would not end it
            time.sleep(0.01)
    return put_and_wait
chat.put, generate.put = held(chat.put), held(generate.put)
sys.exit(main(sys.argv[1:]))
"""
PATIENCE_SECONDS = 120
REFERENCE = ("--engine", "reference", "--max-new-tokens", "400")


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal."""

    def __init__(self, *arguments: str, term: str = "xterm") -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        environment = {**os.environ, "TERM": term, "COLUMNS": "200", "PROMPT_TOOLKIT_NO_CPR": "1"}
        command = [sys.executable, "-c", OF_THE_TERMINAL + HELD, *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
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

    def type(self, line: str, end: str = "\r") -> None:
        self.shown = ""
        os.write(self._master, f"{line}{end}".encode())

    def press_the_ctrl_c_key(self) -> None:
        """Press the key, of which the terminal makes a signal unless the program reads every key itself."""
        self._wait_until_it_sleeps()
        self.shown = ""
        os.write(self._master, b"\x03")

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

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

    def _wait_until_it_sleeps(self) -> None:
        """Wait until it reads: a signal between Python's last look at signals and the read itself would be seen after the next key."""
        status = Path(f"/proc/{self.process.pid}/stat")
        asleep = 0
        while status.exists() and asleep < 3:
            asleep = asleep + 1 if status.read_text().rpartition(")")[2].split()[0] == "S" else 0
            time.sleep(0.01)

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

    def open_terminal(*arguments: str, term: str = "xterm") -> Terminal:
        opened.append(Terminal(*arguments, term=term))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


PROMPT = "\r\n>"
UP, PASTE, END_OF_PASTE = "\x1b[A", "\x1b[200~", "\x1b[201~"


def test_a_chat(terminal: Callable[..., Terminal]):
    screen = terminal("chat", str(SHIPPED), *REFERENCE)
    screen.wait_for("/help lists the commands, Ctrl-C stops an answer")
    screen.wait_for(PROMPT)
    screen.type("The rabbit-hole went straight")
    screen.wait_for(" on like a tunnel")
    screen.press_ctrl_c()
    screen.wait_for("(stopped)")
    screen.wait_for(PROMPT)
    screen.type("/stats")
    screen.wait_for("ReferenceEngine on cpu: prefill 13 tokens")
    screen.wait_for(PROMPT)
    screen.type("/undo")
    screen.wait_for("Taken back: The rabbit-hole went straight")
    screen.wait_for(PROMPT)
    screen.press_ctrl_d()
    assert screen.end() == 0
    assert "Traceback" not in screen.shown


def test_arrow_keys_bring_back_earlier_lines(terminal: Callable[..., Terminal]):
    screen = terminal("chat", str(SHIPPED), *REFERENCE)
    screen.wait_for(PROMPT)
    screen.type("/undo")
    screen.wait_for("There is no turn to take back.")
    screen.wait_for(PROMPT)
    screen.type(UP)
    screen.wait_for("There is no turn to take back.")


def test_pasted_lines_are_one_message(terminal: Callable[..., Terminal], tmp_path: Path):
    screen = terminal("chat", str(SHIPPED), *REFERENCE[:2], "--max-new-tokens", "2")
    screen.wait_for(PROMPT)
    screen.type(f"{PASTE}The rabbit-hole\nwent straight{END_OF_PASTE}")
    screen.wait_for("(ended after 2 tokens")
    screen.wait_for(PROMPT)
    screen.type(f"/save {tmp_path / 'talk.json'}")
    screen.wait_for("1 turn saved.")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0]["content"] == "The rabbit-hole\nwent straight"


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_ctrl_c_at_the_prompt_of_a_chat_asks_before_it_leaves(terminal: Callable[..., Terminal], kind: str):
    screen = terminal("chat", str(SHIPPED), *REFERENCE, term=kind)
    screen.wait_for(PROMPT)
    screen.press_the_ctrl_c_key()
    screen.wait_for("Press Ctrl-C again to leave")
    screen.wait_for(PROMPT)
    screen.press_the_ctrl_c_key()
    assert screen.end() == 130
    assert screen.shown.rstrip().endswith("interrupted")


def test_ctrl_c_clears_a_line_that_was_begun(terminal: Callable[..., Terminal]):
    screen = terminal("chat", str(SHIPPED), *REFERENCE)
    screen.wait_for(PROMPT)
    screen.type("a question that", end="")
    screen.wait_for("that")
    screen.press_the_ctrl_c_key()
    screen.type("/undo")
    screen.wait_for("There is no turn to take back.")
    assert "Press Ctrl-C again" not in screen.shown


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
