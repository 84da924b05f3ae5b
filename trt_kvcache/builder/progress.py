"""``BuildProgress``: the progress of a TensorRT build as one number from 0 to 1."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trt_kvcache._util.freed_memory import return_freed_memory


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Turns TensorRT's nested phases into a fraction that only grows."""

    def __init__(self, report: Callable[[float], object]) -> None:
        self.interruption: BaseException | None = None
        self._report = report
        self._phases: dict[str, _Phase] = {}
        self._shown = 0.0
        self._lock = threading.Lock()

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Begin a phase, within the current step of its parent."""
        with self._lock:
            self._phases[phase] = _Phase(parent, max(steps, 1))

    def step(self, phase: str, step: int) -> bool:
        """Note that a step of a phase is done, and report the progress."""
        with self._lock:
            if phase in self._phases:
                self._phases[phase].done = step + 1
                self._show(self._fraction(phase))
        return self.interruption is None

    def finish(self, phase: str) -> None:
        """End a phase."""
        with self._lock:
            self._phases.pop(phase, None)

    def _fraction(self, phase: str) -> float:
        """Return the fraction of the outermost phase around ``phase`` that is done."""
        inner = 0.0
        name: str | None = phase
        while name in self._phases:
            found = self._phases[name]
            inner = min((found.done + inner) / found.steps, 1.0)
            name = found.parent
        return inner

    def _show(self, fraction: float) -> None:
        """Report a fraction that is larger than the last one."""
        if fraction <= self._shown or self.interruption is not None:
            return
        self._shown = fraction
        try:
            self._report(fraction)
        except BaseException as error:  # noqa: BLE001  # raised again when the build has returned
            self.interruption = error


def make_monitor(module: Any, progress: BuildProgress) -> Any:
    """Return a progress monitor for a build."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]  # TensorRT is not imported when this is checked
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return_freed_memory()  # of each weight that TensorRT has dequantized, or the peak is that of dense weights
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()
