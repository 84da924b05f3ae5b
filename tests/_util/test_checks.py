"""Indices are refused at both ends of their range, and never wrap."""

import numpy as np
import pytest

from trt_kvcache._util.checks import int_in_range, layer_index, slot_index
from trt_kvcache.errors import LayerIndexError, RangeError, SlotError

CHECKS = pytest.mark.parametrize(("check", "error"), [(slot_index, SlotError), (layer_index, LayerIndexError)])


@CHECKS
@pytest.mark.parametrize("index", [0, 2, np.int64(2)])
def test_an_index_below_the_count_is_taken_as_an_int(check, error, index):
    taken = check(index, 3)
    assert (taken, type(taken)) == (index, int)


@CHECKS
@pytest.mark.parametrize("index", [-1, 3, 4])
def test_an_index_outside_is_refused(check, error, index):
    with pytest.raises(error, match=rf" {index}: expected 0 <= \w+ < 3\b"):
        check(index, 3)


@CHECKS
@pytest.mark.parametrize("index", [True, 1.0, "1", None])
def test_what_is_no_integer_is_refused(check, error, index):
    with pytest.raises(error, match="expected an integer"):
        check(index, 3)


@pytest.mark.parametrize("number", [2, 5])
def test_both_ends_of_a_range_belong_to_it(number):
    assert int_in_range("n", number, 2, 5) == number


@pytest.mark.parametrize("number", [1, 6])
def test_a_number_outside_a_range_is_refused(number):
    with pytest.raises(RangeError, match=rf"^n: expected an integer from 2 to 5, got {number}\.$"):
        int_in_range("n", number, 2, 5)
