"""A build in a process of its own, so that it can be ended at any moment.

TensorRT does not return for tens of seconds, and Python sees Ctrl-C only when it does. The process that builds can be killed instead: until
it begins to write, it has nothing on disk. While it writes, it is asked to stop, and removes what it has written.

The two processes talk through stdin and stdout of the child, in pickled pairs ``(what, value)``. Before the child writes, it waits for the
parent to agree; so both always know whether it may be killed.
"""

import _thread
import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

from trt_kvcache._util.progress import Progress
from trt_kvcache.builder.build_engine import WRITING, BuildReport
from trt_kvcache.cli.interrupt import Interrupts, held_interrupts
from trt_kvcache.errors import BuildError

#: The function that builds, as ``module:function``.
BUILDER = "trt_kvcache.builder.build_engine:build_engine"

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from trt_kvcache.cli.build_process import run_child; run_child()"
_POLL_SECONDS = 0.1
#: The first of each pair.
_PROGRESS, _WARNING, _LOG, _MAY_WRITE, _STOP = "progress", "warning", "log", "may write", "stop"
_DONE, _FAILED, _ENDED = "done", "failed", "ended"


def build_in_child(*arguments: Any, progress: Progress, on_interrupt: Callable[[], object], **options: Any) -> BuildReport:
    """Call ``build_engine`` in a child process."""
    request = (BUILDER, logging.getLogger("trt_kvcache").getEffectiveLevel(), arguments, options)
    with held_interrupts() as interrupts, _Child() as child:
        child.send(sys.path)
        child.send(request)
        return _follow(child, interrupts, progress, on_interrupt)


def _follow(child: "_Child", interrupts: Interrupts, progress: Progress, on_interrupt: Callable[[], object]) -> BuildReport:
    """Take what the child reports until it has a result."""
    asked_to_stop = False
    while True:
        if interrupts.held and not asked_to_stop:
            asked_to_stop = True
            on_interrupt()
            child.send((_STOP, None))
        try:
            what, value = child.received.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if what == _PROGRESS:
            progress(*value)
        elif what == _WARNING:
            warnings.warn_explicit(*value)
        elif what == _LOG:
            logging.getLogger(value.name).handle(value)
        elif what == _MAY_WRITE:
            child.writes = not asked_to_stop
            child.send((_MAY_WRITE, None))
        elif what == _DONE:
            report: BuildReport = value
            return report
        elif what == _FAILED:
            _raise_again(*value)
        else:
            raise BuildError(f"the engine could not be built: the building process ended {child.end()}. Nothing was written.")


def _raise_again(error: BaseException, remote_traceback: str) -> NoReturn:
    """Raise what was raised in the child. An unexpected error shows where."""
    error.__cause__ = RuntimeError(f"in the building process:\n{remote_traceback}")
    raise error


class _Child:
    """The building process, from its start to its end."""

    def __init__(self) -> None:
        #: What it sent.
        self.received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        #: Whether it may have files on disk.
        self.writes = False

    def __enter__(self) -> "_Child":
        with _without_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=_inherited_stderr(),
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows: Ctrl-C does not reach the child
            )
        threading.Thread(target=self._receive, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.writes:
            self._process.kill()
        self._close_stdin()  # it ends, and removes what it was writing
        self._process.wait()

    def send(self, message: object) -> None:
        """Send a message. If the child has ended, nothing happens."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def end(self) -> str:
        """Wait for its end and return how it ended, in words."""
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"by {name}; the machine may be out of memory" if name == "SIGKILL" else f"by {name}"

    def _receive(self) -> None:
        """Pass on what comes; in a thread of its own, so that no message is cut by a signal."""
        stdout = self._process.stdout
        assert stdout is not None
        with stdout, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                self.received.put(pickle.load(stdout))
        self.received.put((_ENDED, None))

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def _inherited_stderr() -> int | None:
    """Return None, for the stderr of this process, if it has one."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return None


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Have a child that is started here never see Ctrl-C, which a terminal sends to all its processes. For this process it is kept."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_child() -> None:
    """Build in the child: read the request from stdin, and write what happens to stdout."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # raised by `interrupt_main`; a Ctrl-C of the terminal is blocked
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print on stdout do not disturb
    builder, log_level, arguments, options = pickle.load(sys.stdin.buffer)
    parent = _Parent(sys.stdin.buffer, out)
    threading.Thread(target=parent.listen, daemon=True).start()
    logging.getLogger("trt_kvcache").setLevel(log_level)
    logging.getLogger().addHandler(_LogHandler(parent))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = parent.warn
            module, _, name = builder.partition(":")
            report = getattr(import_module(module), name)(*arguments, progress=parent.progress, **options)
        parent.finish(_DONE, report)
    except BaseException as error:  # noqa: BLE001  # raised again in the parent
        parent.finish(_FAILED, (_picklable(error), traceback.format_exc()))
    os._exit(0)  # at once: Python cannot end properly while the other thread reads


def _picklable(error: BaseException) -> BaseException:
    """Return the exception, or one with the same text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _LogHandler(logging.Handler):
    """Sends the log to the parent."""

    def __init__(self, parent: "_Parent") -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, with its text instead of arguments."""
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self._parent.send(_LOG, record)


class _Parent:
    """The process that wants the engine, as the child sees it."""

    def __init__(self, requests: BinaryIO, reports: BinaryIO) -> None:
        self._requests = requests
        self._reports = reports
        self._sending = threading.Lock()
        #: Guards the two below.
        self._state = threading.Lock()
        self._stopped = False
        #: Whether there may be files on disk that this process has to remove.
        self._writing = False
        self._answered = threading.Event()

    def send(self, what: str, value: object) -> None:
        """Send a message. If the parent has ended, nothing happens."""
        with self._sending, contextlib.suppress(OSError):
            pickle.dump((what, value), self._reports)
            self._reports.flush()

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object) -> None:
        """Send a warning: the hook of :mod:`warnings`."""
        self.send(_WARNING, (message, category, filename, lineno))

    def progress(self, stage: str, done: float | None) -> None:
        """Report the progress. Raise ``KeyboardInterrupt`` if the parent asked to stop; before anything is written, wait for its word."""
        if stage == WRITING and not self._writing:
            self.send(_MAY_WRITE, None)
            self._answered.wait()
        with self._state:
            if self._stopped:
                raise KeyboardInterrupt
            self._writing = stage == WRITING
        self.send(_PROGRESS, (stage, done))

    def finish(self, what: str, value: object) -> None:
        """Send the result. Nothing is left to be removed."""
        with self._state:
            self._writing = False
        self.send(what, value)

    def listen(self) -> None:
        """Wait for messages, and for the end of the parent: then its side of the pipe is closed, however it ended."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                what, _ = pickle.load(self._requests)
                if what == _STOP:
                    self._stop()
                else:
                    self._answered.set()
        self._stop()
        with self._state:
            if not self._writing:
                os._exit(1)

    def _stop(self) -> None:
        """Have the build stop at its next report. Once it writes, raise ``KeyboardInterrupt`` in it, once."""
        with self._state:
            if self._writing and not self._stopped:
                _thread.interrupt_main()
            self._stopped = True
