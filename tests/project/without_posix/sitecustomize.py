"""What Python has on Windows, in every process that has this folder on its path: POSIX modules and functions are hidden.

Other packages are the builds for this system: those that use POSIX are imported first, and keep it.
"""

import asyncio  # noqa: F401
import contextlib
import importlib
import mmap
import multiprocessing.util  # noqa: F401
import os
import signal
import subprocess  # noqa: F401
import sys
from types import ModuleType

#: Importable names of POSIX, and functions of ``os`` and ``signal``.
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog")
FUNCTIONS = (
    *("fork", "forkpty", "symlink", "link", "register_at_fork", "nice", "sysconf", "getuid", "geteuid", "getpgid", "setsid", "killpg"),
    *("sched_getaffinity", "sched_setaffinity", "statvfs", "chown", "mkfifo", "openpty", "wait4", "uname", "getloadavg"),
    *("pthread_sigmask", "alarm", "setitimer", "sigwait"),
)
#: Signals of Windows.
SIGNALS = ("SIGINT", "SIGTERM")

OTHERS = ("numpy", "ml_dtypes", "huggingface_hub", "jinja2", "prompt_toolkit", "psutil", "rich.console", "tokenizers", "typer", "uvicorn")
for other in (*OTHERS, "fastapi", "prometheus_client", "threadpoolctl", "llguidance", "pydantic", "cuda.core", "tensorrt_rtx"):
    with contextlib.suppress(ImportError):
        importlib.import_module(other)

of_posix = ModuleType("signal")
of_posix.__dict__.update(vars(signal))
hidden = signal
for module in [*sys.modules.values()]:  # of Python and of other packages: they know their own system
    if getattr(module, "signal", None) is hidden:
        module.signal = of_posix  # type: ignore[attr-defined]
for name in MODULES:
    sys.modules[name] = None  # type: ignore[assignment]
for place in (os, hidden):
    for name in FUNCTIONS:
        if hasattr(place, name):
            delattr(place, name)
for name in [*vars(hidden)]:
    if name.startswith("SIG") and name not in (*SIGNALS, "SIG_DFL", "SIG_IGN"):
        delattr(hidden, name)
for name in [*vars(mmap)]:
    if name.startswith("MADV_"):
        delattr(mmap, name)
