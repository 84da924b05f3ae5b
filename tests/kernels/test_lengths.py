"""Increment and store lengths. What they refuse is in test_refused.py."""

import numpy as np
import pytest

from trt_kvcache.kernels import increment_length_tensor, store_length_values

LENGTHS, GUARDS = [3, 0, 12, 5, 1], [-7, -8, -9]


def run(memory, stream, function, *arguments, **named):
    """Run a function on five lengths between three others on either side, which must stay; return the five afterwards."""
    whole = memory.to_device(np.array(GUARDS + LENGTHS + GUARDS, np.int32), stream=stream)
    function(whole[3:8], *arguments, stream=stream, **named)
    numbers = whole.numpy().tolist()
    assert numbers[:3] == numbers[8:] == GUARDS
    return numbers[3:8]


@pytest.mark.parametrize("increment", [0, 1, -2, 2**30, np.int64(4)])
def test_increment_by_a_number(memory, stream, increment):
    assert run(memory, stream, increment_length_tensor, increment) == [length + increment for length in LENGTHS]


def test_increment_by_a_tensor(memory, stream):
    numbers = [99, 4, 0, 1, 7, -1, 99]
    increments = memory.to_device(np.array(numbers, np.int32), stream=stream)
    assert run(memory, stream, increment_length_tensor, increments[1:6]) == [7, 0, 13, 12, 0]
    assert increments.numpy().tolist() == numbers
    increment_length_tensor(increments, increments, stream=stream)
    assert increments.numpy().tolist() == [2 * one for one in numbers]


@pytest.mark.parametrize(("accumulate", "expected"), [(False, [4, 0, 9, -1, 2]), (True, [7, 0, 21, 4, 3])])
@pytest.mark.parametrize("kind", [int, np.int32])
def test_store(memory, stream, accumulate, expected, kind):
    values = list(map(kind, [4, 0, 9, -1, 2]))
    assert run(memory, stream, store_length_values, values, accumulate=accumulate) == expected
