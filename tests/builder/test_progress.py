"""One growing number from TensorRT's nested phases."""

import pytest

from trt_kvcache.builder.progress import BuildProgress


def test_nested_phases_count_inside_the_step_of_their_parent():
    seen = []
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
    progress.start("second", None, 8)  # another outermost phase
    progress.step("second", 0)  # never goes back
    progress.step("second", 5)
    progress.step("build", 3)
    assert seen == [0.25, 0.375, 0.4375, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no terminal")])
def test_what_the_callback_raises_stops_the_build_and_is_kept(error):
    calls = []

    def report(fraction):
        calls.append(fraction)
        raise error

    progress = BuildProgress(report)
    progress.start("build", None, 4)
    assert not progress.step("build", 0)
    assert not progress.step("build", 1)
    assert progress.interruption is error
    assert calls == [0.25]
