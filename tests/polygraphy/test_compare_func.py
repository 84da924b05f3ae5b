"""Our tolerances as a comparison function of Polygraphy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from polygraphy.comparator import IterationResult
from polygraphy.logger import G_LOGGER

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError, RangeError
from trt_kvcache.polygraphy.compare_func import SessionCompareFunc
from trt_kvcache.polygraphy.path_comparison import TOLERANCES


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with G_LOGGER.verbosity(G_LOGGER.ERROR):
        yield


def result(name: str, **outputs: Any) -> IterationResult:
    arrays = {output: np.array(values, np.int32 if output == "kvcache_lengths" else np.float32) for output, values in outputs.items()}
    return IterationResult(outputs=arrays, runner_name=name)


def test_a_small_element_may_carry_the_rounding_of_a_large_one() -> None:
    compare = SessionCompareFunc(dtype="float16")
    first, second = result("a", logits=[[100.0, 0.0]]), result("b", logits=[[100.0, 0.5]])
    assert compare(first, second) == {"logits": True}
    assert SessionCompareFunc(dtype="float32")(first, second) == {"logits": False}


def test_each_output_has_its_verdict_and_the_place_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.zeros((1, 2, 3, 4))
    rows[..., 0] = 1.0
    wrong = rows.copy()
    wrong[0, 1, 2, 0] = 2.0
    first = result("a", kvcache_lengths=[3], k_cache_0=rows, v_cache_0=rows, logits=[[1.0]])
    second = result("b", kvcache_lengths=[3], k_cache_0=rows, v_cache_0=wrong, logits=[[1.0]])
    verdict = {"kvcache_lengths": True, "k_cache_0": True, "v_cache_0": False, "logits": True}
    assert SessionCompareFunc()(first, second) == verdict
    assert "layer 0, V, slot 0, head 1, position 2, element 0" in "".join(capsys.readouterr())


def test_other_lengths_or_shapes_do_not_agree() -> None:
    first, second = result("a", kvcache_lengths=[3], logits=[[1.0]]), result("b", kvcache_lengths=[4], logits=[[1.0]])
    assert SessionCompareFunc()(first, second) == {"kvcache_lengths": False}
    assert SessionCompareFunc()(result("a", logits=[[1.0]]), result("b", logits=[[1.0], [1.0]])) == {"logits": False}


def test_a_tolerance_of_its_own() -> None:
    assert SessionCompareFunc(tolerance=0.5).tolerance == 0.5
    assert SessionCompareFunc(dtype="bfloat16").tolerance == TOLERANCES["bfloat16"]
    with raises(RangeError, "tolerance", "0 or more", -1):
        SessionCompareFunc(tolerance=-1)
    with raises(ConfigError, "dtype", expected="float32, float16, bfloat16, int8, float8_e4m3fn", got="'int4'"):
        SessionCompareFunc(dtype="int4")
