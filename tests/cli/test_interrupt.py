import signal
from contextlib import contextmanager

import pytest

from trt_kvcache.builder.build_engine import BUILDING
from trt_kvcache.cli.console import progress_bar


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        yield reached
    assert reached == ["held"]


def test_progress_holds_it():
    with interrupted() as reached, progress_bar() as report:
        report(BUILDING, 0.1)
        ctrl_c()
        reached.append("held")
        report(BUILDING, 0.2)
        reached.append("too far")
