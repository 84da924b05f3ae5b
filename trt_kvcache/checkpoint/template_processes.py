"""``TemplateProcesses``: a pool of processes that render one chat template, so that a slow text blocks no other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from trt_kvcache.checkpoint.template_process import TemplateProcess
from trt_kvcache.errors import ClosedError

#: Limit of texts that are rendered at the same time. A process takes about 25 MB.
MOST_PROCESSES = 4

#: Seconds that a text waits for a process before another one is started: starting takes longer than most texts.
_PATIENCE = 0.05


class TemplateProcesses:
    """A template and up to ``MOST_PROCESSES`` processes; another one is started when all are busy. Thread-safe."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._changed = threading.Condition()
        self._idle: list[TemplateProcess] = []
        self._busy: list[TemplateProcess] = []
        self._closed = False

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the rendered text: see :meth:`TemplateProcess.render`. Raises ClosedError after, or during, :meth:`close`."""
        process = self._take()
        try:
            return process.render(values)
        except Exception:
            self._check_open()
            raise
        finally:
            self._give_back(process)

    def close(self) -> None:
        """End all processes and their rendering. Thread-safe, idempotent."""
        with self._changed:
            self._closed = True
            for process in (*self._idle, *self._busy):
                process.kill()
            self._changed.notify_all()

    def __reduce__(self) -> tuple[type[TemplateProcesses], tuple[str]]:
        """Let a copy start its own processes."""
        return TemplateProcesses, (self._text,)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("chat template: no text is rendered any more: it was closed.")

    def _take(self) -> TemplateProcess:
        """Return the idle process that was used last, or a new one."""
        with self._changed:
            if self._busy and not self._idle:
                self._changed.wait_for(lambda: self._idle or self._closed, _PATIENCE)
            self._changed.wait_for(lambda: self._idle or self._closed or len(self._busy) < MOST_PROCESSES)
            self._check_open()
            process = self._idle.pop() if self._idle else TemplateProcess(self._text)
            self._busy.append(process)
            return process

    def _give_back(self, process: TemplateProcess) -> None:
        with self._changed:
            self._busy.remove(process)
            self._idle.append(process)
            self._changed.notify()
