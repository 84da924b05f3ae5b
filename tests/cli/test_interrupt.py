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


def test_one_is_held_until_it_is_asked_for():
    with interrupted() as reached, held_interrupts() as interrupts:
        interrupts.check()
        ctrl_c()
        reached.append("held")
        interrupts.check()
        reached.append("too far")


def test_the_handler_from_before_is_back_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with held_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_is_held():
    done = []

    def work():
        with held_interrupts() as interrupts:
            interrupts.check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


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
