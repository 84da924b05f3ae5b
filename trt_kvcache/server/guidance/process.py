"""``WorkerProcess``: starts, calls, watches and ends a worker process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trt_kvcache.server.guidance import worker

#: Flags on Windows: low priority (a worker sets it itself elsewhere), and no window.
_FLAGS: int = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)

_LOWEST_PRIORITY: int = getattr(subprocess, "IDLE_PRIORITY_CLASS", 19)


#: Most bytes of an answer apart from its mask.
_LONGEST_ANSWER = 1 << 16


class Opening(NamedTuple):
    """Initial data of a worker."""

    tokenizer: bytes  # tokenizer.json
    vocab_size: int  # bits of a mask
    eos_token_ids: tuple[int, ...]
    memory: int  # limit in bytes


class WorkerEndedError(Exception):
    """A worker has ended."""


class Usage(NamedTuple):
    """Usage of a worker so far: seconds of CPU time, and bytes of memory."""

    seconds: float
    nbytes: int


class WorkerProcess:
    """A process that runs :mod:`trt_kvcache.server.guidance.worker`, from :meth:`open` on."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: psutil.Process | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Process id, once it has started."""
        return None if self._process is None else self._process.pid

    def open(self) -> dict[str, Any]:
        """Start it and wait for its answer: empty, or with ``missing`` or ``refused`` if it cannot open the tokenizer."""
        try:
            self._process = subprocess.Popen(
                [os.fsdecode(get_executable() or sys.executable), worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                creationflags=_FLAGS,
            )
            self._watched = psutil.Process(self._process.pid)
        except (OSError, psutil.Error):
            raise WorkerEndedError from None
        if self._killed:  # before the process had started
            self.kill()
        opening = self._opening
        header = {
            "path": [str(Path(entry).absolute()) if entry == "" else entry for entry in sys.path],
            "vocab_size": opening.vocab_size,
            "eos_token_ids": opening.eos_token_ids,
            "memory": opening.memory,
        }
        return self.exchange(header, opening.tokenizer)[0]

    def exchange(self, header: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        """Send a frame, and wait for the answer. Raises WorkerEndedError, also after :meth:`kill`."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            worker.write_frame(process.stdin, header, payload)
            answer = worker.read_frame(process.stdout, limit=self._opening.vocab_size + _LONGEST_ANSWER)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            raise WorkerEndedError
        return answer

    def usage(self) -> Usage:
        """Return its usage; zeros if it has ended."""
        assert self._watched is not None
        try:
            with self._watched.oneshot():
                times = self._watched.cpu_times()
                return Usage(times.user + times.system, self._watched.memory_info().rss)
        except psutil.Error:
            return Usage(0.0, 0)

    def lower_priority(self) -> None:
        """Set the lowest priority."""
        with suppress(psutil.Error, OSError):
            if self._watched is not None:
                self._watched.nice(_LOWEST_PRIORITY)

    def kill(self) -> None:
        """Kill it without waiting. From any thread."""
        self._killed = True
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()

    def close(self) -> int:
        """Kill it, wait for its end, and return its exit code."""
        self.kill()
        if self._process is None:
            return 0
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        return code
