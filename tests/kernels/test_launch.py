"""The number of blocks of a launch."""

from __future__ import annotations

import pytest

from trt_kvcache.kernels.cuda.launch import blocks_for


@pytest.mark.parametrize(
    ("units", "runs", "expected"), [(0, 1, 1), (1, 1, 1), (1024, 4, 1), (1025, 4, 2), (2**40, 512, 64), (2**40, 2**20, 1)]
)
def test_blocks(units, runs, expected):
    assert blocks_for(units, runs) == expected


def test_at_most():
    assert blocks_for(2**20, 3, most=100) == 33
