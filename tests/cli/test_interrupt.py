from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from trt_kvcache.builder.build_engine import BUILDING, WRITING
from trt_kvcache.cli.console import progress_bar
from trt_kvcache.cli.interrupt import held_interrupts

Reached = list[str]


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def reached_before_the_interrupt(work: Callable[[Reached], None]) -> Reached:
    """Run ``work``, which must end with ``KeyboardInterrupt``; return what it noted until then."""
    reached: Reached = []
    with pytest.raises(KeyboardInterrupt):
        work(reached)
    return reached


def test_ctrl_c_is_held_back_until_check():
    def work(reached: Reached) -> None:
        with held_interrupts() as interrupts:
            interrupts.check()
            ctrl_c()
            reached.append("held")
            interrupts.check()
            reached.append("too far")

    assert reached_before_the_interrupt(work) == ["held"]


def test_a_held_ctrl_c_is_raised_at_the_end_even_after_another_error():
    def work(reached: Reached) -> None:
        with held_interrupts():
            ctrl_c()
            reached.append("held")
            raise ImportError("initialization failed")

    assert reached_before_the_interrupt(work) == ["held"]


def test_a_second_ctrl_c_is_raised_at_once():
    def work(reached: Reached) -> None:
        with held_interrupts():
            ctrl_c()
            reached.append("held")
            ctrl_c()
            reached.append("too far")

    assert reached_before_the_interrupt(work) == ["held"]


def test_ctrl_c_is_raised_at_once_while_nothing_is_held_back():
    def work(reached: Reached) -> None:
        with held_interrupts() as interrupts:
            interrupts.hold = False
            ctrl_c()
            reached.append("too far")

    assert reached_before_the_interrupt(work) == []


def test_the_previous_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with held_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts() as interrupts:
            ctrl_c()
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back():
    done = []

    def work() -> None:
        with held_interrupts() as interrupts:
            interrupts.check()
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_progress_holds_ctrl_c_back_while_tensorrt_builds():
    def work(reached: Reached) -> None:
        with progress_bar() as report:
            report(BUILDING, 0.1)
            ctrl_c()
            reached.append("inside TensorRT")
            report(BUILDING, 0.2)
            reached.append("too far")

    assert reached_before_the_interrupt(work) == ["inside TensorRT"]


def test_progress_holds_ctrl_c_back_before_the_first_stage():
    def work(reached: Reached) -> None:
        with progress_bar():
            ctrl_c()
            reached.append("TensorRT is being imported")

    assert reached_before_the_interrupt(work) == ["TensorRT is being imported"]


@pytest.mark.parametrize("stage", [(BUILDING, 1.0), (WRITING, None)])
def test_progress_does_not_hold_ctrl_c_back_in_other_stages(stage: Any):
    def work(reached: Reached) -> None:
        with progress_bar() as report:
            report(BUILDING, 0.1)
            report(*stage)
            ctrl_c()
            reached.append("too far")

    assert reached_before_the_interrupt(work) == []
