"""The number of blocks of a launch, and the preference of kernels for the L1."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.kernels import linear
from trt_kvcache.kernels.launch import _prefer_l1, blocks_for


@pytest.mark.parametrize(
    ("vectors", "runs", "expected"), [(0, 1, 1), (1, 1, 1), (1024, 4, 1), (1025, 4, 2), (2**40, 512, 2048), (2**40, 2**21, 1)]
)
def test_blocks_for_as_many_vectors_as_threads_have_in_flight(vectors, runs, expected):
    assert blocks_for(vectors, runs) == expected


def test_blocks_are_limited_in_all_dimensions_together():
    assert blocks_for(2**20, 3, max_blocks=100) == 33


def test_a_product_prefers_the_l1_whatever_was_launched_before(memory, stream, monkeypatch):
    """Rows of x are read through it. Values do not depend on it, so no other test shows it."""
    calls = []
    if not memory.is_host:
        from cuda.bindings import driver

        set_attribute = driver.cuKernelSetAttribute
        monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *of: calls.append(of[:2]) or set_attribute(*of))
    _prefer_l1.cache_clear()
    x, weight, out = (memory.to_device(np.ones(shape, np.float16), stream=stream) for shape in ((8, 64), (16, 64), (8, 16)))
    for _ in range(2):
        linear(x, weight, out=out, stream=stream)
    assert (out.numpy() == 64).all()
    if not memory.is_host:
        assert calls == [(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 0)]
