"""One growing number from TensorRT's nested phases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trt_kvcache.builder.progress import BuildProgress, make_monitor


def test_nested_phases_count_inside_the_step_of_their_parent() -> None:
    seen: list[float] = []
    progress = BuildProgress(seen.append)
    progress.start("build", None, 4)
    progress.step("build", 0)
    progress.start("inner", "build", 2)
    progress.step("inner", 0)
    progress.start("innermost", "inner", 2)
    progress.step("innermost", 0)
    progress.finish("innermost")
    progress.step("inner", 1)
    progress.finish("inner")
    progress.step("build", 1)
    progress.step("build", 3)
    assert seen == [0.25, 0.375, 0.4375, 0.5, 1.0]


def test_never_goes_back() -> None:
    seen: list[float] = []
    progress = BuildProgress(seen.append)
    progress.start("first", None, 2)
    progress.step("first", 0)
    progress.start("second", None, 4)  # another outermost phase
    progress.step("second", 0)
    progress.step("second", 2)
    assert seen == [0.5, 0.75]


def test_unknown_phases_and_zero_steps_do_no_harm() -> None:
    seen: list[float] = []
    progress = BuildProgress(seen.append)
    assert progress.step("never started", 3)
    progress.finish("never started")
    progress.start("empty", None, 0)
    progress.step("empty", 0)
    assert seen == [1.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no terminal")])
def test_what_the_callback_raises_stops_the_build_and_is_kept(error: BaseException) -> None:
    calls = []

    def report(fraction: float) -> None:
        calls.append(fraction)
        raise error

    progress = BuildProgress(report)
    progress.start("build", None, 4)
    assert not progress.step("build", 0)
    assert not progress.step("build", 1)
    assert progress.interruption is error
    assert calls == [0.25]


def test_memory_that_was_freed_is_given_back_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr("trt_kvcache.builder.progress.return_freed_memory", lambda: calls.append(None))
    monitor = make_monitor(SimpleNamespace(IProgressMonitor=object), BuildProgress(lambda fraction: None))
    monitor.phase_start("build", None, 2)
    assert monitor.step_complete("build", 0)
    assert monitor.step_complete("build", 1)
    monitor.phase_finish("build")
    assert len(calls) == 2
