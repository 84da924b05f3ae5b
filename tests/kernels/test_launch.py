"""The number of blocks of a launch."""

from __future__ import annotations

import pytest

from trt_kvcache.kernels.launch import blocks_for


@pytest.mark.parametrize(
    ("vectors", "runs", "expected"), [(0, 1, 1), (1, 1, 1), (1024, 4, 1), (1025, 4, 2), (2**40, 512, 2048), (2**40, 2**21, 1)]
)
def test_blocks_for_as_many_vectors_as_threads_have_in_flight(vectors, runs, expected):
    assert blocks_for(vectors, runs) == expected


def test_blocks_are_limited_in_all_dimensions_together():
    assert blocks_for(2**20, 3, max_blocks=100) == 33
