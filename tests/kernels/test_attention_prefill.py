"""Attention of several new tokens per slot: against float64, over caches whose dead rows are NaN."""

from __future__ import annotations

import pytest

from kernels.attention import PREFILL_CASES, check


@pytest.mark.parametrize("name", list(PREFILL_CASES))
def test_cases(memory, stream, name):
    check(PREFILL_CASES[name], memory, stream)
