"""Checks that pass, fail, crash and hang, for child processes: their folder is put on PYTHONPATH."""

import os
import time
import warnings
from pathlib import Path

from trt_kvcache.doctor.cases import CheckFailure, NotHere


def check(settings, log):
    way = os.environ["PLANTED"]
    log.run("first", lambda: {"number": 1})
    log.run(
        "second",
        {"passes": lambda: None, "fails": _fail, "is not here": _not_here, "crashes": os.abort, "hangs": _hang}[way],
        variant="mask",
    )
    log.run("third", lambda: None)
    if way == "fails":
        warnings.warn("a warning", UserWarning, stacklevel=1)


def _fail():
    raise CheckFailure(f"expected 1, got 2, in {Path.home() / 'secret' / 'file.txt'}")


def _not_here():
    raise NotHere("no such GPU")


def _hang():
    # a child of its own, which must end too
    marker = Path(os.environ["MARKER"])
    if os.fork() == 0:
        time.sleep(3)
        marker.write_text("still there")
        os._exit(0)
    time.sleep(60)
