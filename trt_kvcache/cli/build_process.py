"""A build in a child process, so that it can be ended at any moment.

A call of TensorRT lasts tens of seconds, and Python handles Ctrl-C only afterwards. The child can be killed instead: until it begins to
write, it has no files. While it writes, it is asked to stop, and removes its files.

The processes exchange pickled pairs ``(kind, value)`` through stdin and stdout of the child. Before the child writes, it waits for the
parent's permission; so both always know whether it may be killed.
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

from trt_kvcache.builder.build_engine import WRITING, BuildReport, Progress
from trt_kvcache.cli.interrupt import Interrupts, held_interrupts
from trt_kvcache.errors import BuildError

#: The build function, as ``module:function``.
BUILDER = "trt_kvcache.builder.build_engine:build_engine"

_CHILD = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from trt_kvcache.cli.build_process import run_child; run_child()"
_POLL_SECONDS = 0.1
#: Kinds of messages.
_PROGRESS, _WARNING, _LOG, _MAY_WRITE, _STOP = "progress", "warning", "log", "may write", "stop"
_DONE, _FAILED, _ENDED = "done", "failed", "ended"


def build_in_child(*arguments: Any, progress: Progress, on_interrupt: Callable[[], object], **options: Any) -> BuildReport:
    """Call ``build_engine`` in a child process. ``on_interrupt`` is called at the first Ctrl-C; a second one ends the build immediately."""
    request = (BUILDER, logging.getLogger("trt_kvcache").getEffectiveLevel(), arguments, options)
    with held_interrupts() as interrupts, _Child() as child:
        child.send(sys.path)
        child.send(request)
        return _follow(child, interrupts, progress, on_interrupt)


def _follow(child: "_Child", interrupts: Interrupts, progress: Progress, on_interrupt: Callable[[], object]) -> BuildReport:
    """Handle messages of the child until it has a result."""
    asked_to_stop = False
    while True:
        if interrupts.held and not asked_to_stop:
            asked_to_stop = True
            on_interrupt()
            child.send((_STOP, None))
        try:
            kind, value = child.received.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if kind == _PROGRESS:
            progress(*value)
        elif kind == _WARNING:
            warnings.warn_explicit(*value)
        elif kind == _LOG:
            logging.getLogger(value.name).handle(value)
        elif kind == _MAY_WRITE:
            child.writes = not asked_to_stop
            child.send((_MAY_WRITE, None))
        elif kind == _DONE:
            report: BuildReport = value
            return report
        elif kind == _FAILED:
            _raise_again(*value)
        else:
            raise BuildError(f"the engine could not be built: the building process ended {child.end()}. Nothing was written.")


def _raise_again(error: BaseException, remote_traceback: str) -> NoReturn:
    """Raise an error of the child, with its traceback as the cause."""
    error.__cause__ = RuntimeError(f"in the building process:\n{remote_traceback}")
    raise error


class _Child:
    """The child process, from its start to its end."""

    def __init__(self) -> None:
        #: Received messages.
        self.received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        #: True if it may have files on disk.
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
        self._close_stdin()  # it ends, and removes unfinished files
        self._process.wait()

    def send(self, message: object) -> None:
        """Send a message. Ignored if the child has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def end(self) -> str:
        """Wait for its end, and return the exit status in words."""
        code = self._process.wait()
        if code >= 0:
            return f"with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"by {name}; the machine may be out of memory" if name == "SIGKILL" else f"by {name}"

    def _receive(self) -> None:
        """Queue messages. A separate thread reads them, so that no signal cuts one."""
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
    """Return None to inherit stderr, or DEVNULL if it is closed."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return None


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C, which a terminal sends to all its processes, in a child that is started here. This process gets it at the end."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_child() -> None:
    """Run the build in the child: read the request from stdin, write messages to stdout."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # raised by `interrupt_main`; a Ctrl-C of the terminal is blocked
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with messages
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
    os._exit(0)  # Python cannot exit normally while the other thread reads


def _picklable(error: BaseException) -> BaseException:
    """Return the exception, or one with the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # any error of its class
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _LogHandler(logging.Handler):
    """Sends the log to the parent."""

    def __init__(self, parent: "_Parent") -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record with its formatted text."""
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self._parent.send(_LOG, record)


class _Parent:
    """The parent process, for the child."""

    def __init__(self, requests: BinaryIO, reports: BinaryIO) -> None:
        self._requests = requests
        self._reports = reports
        self._sending = threading.Lock()
        #: Guards ``_stopped`` and ``_writing``.
        self._state = threading.Lock()
        self._stopped = False
        #: True if there may be unfinished files, which this process must remove.
        self._writing = False
        self._answered = threading.Event()

    def send(self, kind: str, value: object) -> None:
        """Send a message. Ignored if the parent has ended."""
        with self._sending, contextlib.suppress(OSError):
            pickle.dump((kind, value), self._reports)
            self._reports.flush()

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object) -> None:
        """Send a warning. A hook of :mod:`warnings`."""
        self.send(_WARNING, (message, category, filename, lineno))

    def progress(self, stage: str, done: float | None) -> None:
        """Report progress. Raise ``KeyboardInterrupt`` if the parent asked to stop; wait for its permission before the first write."""
        if stage == WRITING and not self._writing:
            self.send(_MAY_WRITE, None)
            self._answered.wait()
        with self._state:
            if self._stopped:
                raise KeyboardInterrupt
            self._writing = stage == WRITING
        self.send(_PROGRESS, (stage, done))

    def finish(self, kind: str, value: object) -> None:
        """Send the result. All files are complete."""
        with self._state:
            self._writing = False
        self.send(kind, value)

    def listen(self) -> None:
        """Handle messages until the pipe closes, which the system does when the parent ends in any way."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                kind, _ = pickle.load(self._requests)
                if kind == _STOP:
                    self._stop()
                else:
                    self._answered.set()
        self._stop()
        with self._state:
            if not self._writing:
                os._exit(1)

    def _stop(self) -> None:
        """Stop the build at its next report; while it writes, raise ``KeyboardInterrupt`` in it, once."""
        with self._state:
            if self._writing and not self._stopped:
                _thread.interrupt_main()
            self._stopped = True
