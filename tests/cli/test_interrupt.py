import signal
import threading
from contextlib import contextmanager

import pytest

from trt_kvcache.builder import BUILDING, WRITING
from trt_kvcache.cli.console import progress_bar
from trt_kvcache.cli.interrupt import held_interrupts


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted():
    """Check that the body ends with KeyboardInterrupt before it notes "too far"."""
    reached = []
    with pytest.raises(KeyboardInterrupt):
        yield reached
    assert reached == ["held"]








@pytest.mark.parametrize("building", [True, False], ids=["while TensorRT builds", "before the first stage"])
def test_progress_holds_it(building):
    with interrupted() as reached, progress_bar() as report:
        if building:
            report(BUILDING, 0.1)
        ctrl_c()
        reached.append("held")
        report(BUILDING, 0.2)
        reached.append("too far")


@pytest.mark.parametrize("stage", [(BUILDING, 1.0), (WRITING, None)])
def test_progress_does_not_hold_it_elsewhere(stage):
    with interrupted() as reached, progress_bar() as report:
        report(BUILDING, 0.1)
        report(*stage)
        reached.append("held")
        ctrl_c()
        reached.append("too far")
