"""``TemplateProcess``: renders a chat template in a separate process with limits of time and memory.

A template is a program that came with a model. Jinja's sandbox keeps it away from files and from Python, but ``'%1000000000d' % 1`` or
nested loops make the process hang or run out of memory, some already when they are compiled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import getpid
from pathlib import Path
from typing import Any

from trt_kvcache.checkpoint import template_worker

#: Time limit of a text in seconds. Templates take milliseconds.
TIMEOUT_SECONDS = 10.0

#: Memory limit of the process.
MEMORY_NBYTES = 1 << 30

#: Limit of a text in characters.
MAX_LENGTH = 1 << 24


class TemplateFailure(Exception):
    """A template gave no text. The message says why, without a full stop. ``cannot_be_read``: the template itself is invalid."""

    def __init__(self, message: str, *, cannot_be_read: bool = False) -> None:
        super().__init__(message)
        self.cannot_be_read = cannot_be_read


class TemplateProcess:
    """A template and the process that renders it: started on first use, stopped with this object. Thread-safe."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._killed = False

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises TemplateFailure; TypeError or ValueError for values that are no JSON; OSError."""
        line = json.dumps(values, default=_plain)
        with self._lock:
            if self._process is None or self._owner != getpid() or self._process.poll() is not None:
                self._start()
            if self._killed:
                self.kill()
            answer = self._ask(line)
        if answer is None:
            raise TemplateFailure(f"it was stopped, because it took longer than {TIMEOUT_SECONDS:g} s or too much memory")
        if "text" in answer:
            return str(answer["text"])
        if "cannot_be_read" in answer:
            raise TemplateFailure(answer["cannot_be_read"], cannot_be_read=True)
        raise TemplateFailure(answer["refuses"])

    def __reduce__(self) -> tuple[type[TemplateProcess], tuple[str]]:
        """Let a copy start its own process."""
        return TemplateProcess, (self._text,)

    def kill(self) -> None:
        """End the process and its rendering now. It cannot be restarted. Thread-safe."""
        self._killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(template_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        self._owner = getpid()
        weakref.finalize(self, _stop, self._process)
        start = {"path": sys.path, "template": self._text, "memory_nbytes": MEMORY_NBYTES, "max_length": MAX_LENGTH}
        self._send(json.dumps(start))

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:  # the process has ended: there will be no answer either
            return

    def _ask(self, line: str) -> dict[str, Any] | None:
        """Return the answer of the process; None if it was stopped."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(TIMEOUT_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._send(line)
            answer = process.stdout.readline()
        except BaseException:  # an interrupt: this answer would be read as the next one
            self._process = None
            _stop(process)
            raise
        finally:
            timer.cancel()
        if answer.endswith("\n"):
            found: dict[str, Any] = json.loads(answer)
            return found
        self._process = None
        _stop(process)
        return None


def _plain(value: Any) -> Any:
    """Return a mapping as a dict and a sequence as a list, for ``json.dumps``."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"got {type(value).__name__}")


def _stop(process: subprocess.Popen[str]) -> None:
    """End a process, and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # something was not written yet
            if pipe is not None:
                pipe.close()
    process.wait()
