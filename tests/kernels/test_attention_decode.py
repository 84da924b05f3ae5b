"""Attention of one new token per slot: against float64, over caches whose dead rows are NaN."""

from __future__ import annotations

import pytest

from kernels.attention import DECODE_CASES, check


@pytest.mark.parametrize("name", list(DECODE_CASES))
def test_cases(memory, stream, name):
    check(DECODE_CASES[name], memory, stream)
