"""Increment and store lengths. What they refuse is in test_refused.py."""

from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.kernels import increment_length_tensor, store_length_values

LENGTHS, GUARDS = [3, 0, 12, 5, 1], [-7, -8, -9]


@pytest.fixture
def run(memory, stream):
    """Run a function on five lengths between three others on either side, which must stay; return the five afterwards."""

    def call(function, *arguments, part=slice(3, 8), **named):
        whole = memory.to_device(np.array(GUARDS + LENGTHS + GUARDS, np.int32), stream=stream)
        function(whole[part], *arguments, stream=stream, **named)
        numbers = whole.numpy().tolist()
        assert numbers[:3] == numbers[8:] == GUARDS
        return numbers[3:8]

    return call


@pytest.mark.parametrize("increment", [0, 1, -2, 2**30, np.int64(4)])
def test_increment_by_a_number(run, increment):
    assert run(increment_length_tensor, increment) == [length + increment for length in LENGTHS]


def test_increment_by_a_tensor(memory, run, stream):
    increments = memory.to_device(np.array([99, 4, 0, 1, 7, -1, 99], np.int32), stream=stream)
    assert run(increment_length_tensor, increments[1:6]) == [7, 0, 13, 12, 0]
    assert increments.numpy().tolist() == [99, 4, 0, 1, 7, -1, 99]
    increment_length_tensor(increments, increments, stream=stream)
    assert increments.numpy().tolist() == [198, 8, 0, 2, 14, -2, 198]


@pytest.mark.parametrize(("accumulate", "expected"), [(False, [4, 0, 9, -1, 2]), (True, [7, 0, 21, 4, 3])])
def test_store(run, accumulate, expected):
    values = [4, 0, 9, -1, 2]
    for given in (values, list(np.array(values, np.int32))):
        assert run(store_length_values, given, accumulate=accumulate) == expected
