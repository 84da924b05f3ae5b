import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from .conftest import SHIPPED

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
    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
        command = [sys.executable, "-c", SLOW, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.shown = ""

    def wait_for(self, text):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown and time.monotonic() < deadline and self._read():
            pass
        assert text in self.shown

    def type(self, text):
        self.shown = ""
        os.write(self._master, text.encode())

    def press_ctrl_c(self):
        self.process.send_signal(signal.SIGINT)

    def end(self):
        while self._read():
            pass
        assert "Traceback" not in self.shown
        return self.process.wait(PATIENCE_SECONDS)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self):
        if not select.select([self._master], [], [], PATIENCE_SECONDS)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace"))
        return bool(data)


@pytest.fixture
def terminal():
    with contextlib.ExitStack() as opened:
        yield lambda *arguments: opened.enter_context(contextlib.closing(Terminal(*arguments)))


def test_a_chat(terminal):
    screen = terminal("chat", SHIPPED, *REFERENCE)
    screen.wait_for("Ctrl-C stops an answer.")
    screen.wait_for("> ")
    screen.type("The rabbit-hole went straight\n")
    screen.wait_for(" on like a tunnel")
    screen.press_ctrl_c()
    screen.wait_for("(stopped)")
    screen.type("/stats\n")
    screen.wait_for("ReferenceEngine on cpu: prefill 13 tokens")
    screen.type("/undo\n")
    screen.wait_for("Taken back: The rabbit-hole went straight")
    screen.type("\x04")  # Ctrl-D
    assert screen.end() == 0


def test_ctrl_c_ends_generate(terminal):
    screen = terminal("generate", SHIPPED, *REFERENCE, "-p", "The rabbit-hole went straight")
    screen.wait_for(" on like a tunnel")
    screen.press_ctrl_c()
    assert screen.end() == 130
    assert screen.shown.endswith("\r\ninterrupted\r\n"), "in a line of its own"
