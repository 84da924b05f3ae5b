"""Checks of plain arguments: what passes, and what is said of what does not."""

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache._util.checks import as_int, as_sequence, int_in_range, layer_index, one_of, slot_index
from trt_kvcache.errors import ConfigError, LayerIndexError, RangeError, ShapeError, SlotError

NO_INTEGERS = [1.0, "1", None, True, False, np.True_, [1], np.array([1, 2])]


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_of_any_kind_become_ints(value):
    number = as_int("count", value)
    assert (number, type(number)) == (3, int)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer(value):
    with pytest.raises(RangeError) as caught:
        as_int("count", value)
    assert str(caught.value) == f"count: expected an integer, got {value!r}."


def test_the_caller_names_the_error():
    with pytest.raises(ShapeError):
        as_int("count", 1.5, error=ShapeError)


@pytest.mark.parametrize("value", [2, 5, 7])
def test_integers_in_a_range(value):
    assert int_in_range("count", value, 2, 7) == value


@pytest.mark.parametrize("value", [1, 8, -(2**70), 2**70])
def test_integers_out_of_a_range(value):
    with raises(RangeError, "count", expected="2 to 7", got=value):
        int_in_range("count", value, 2, 7)


def test_a_range_without_an_end_holds_any_integer_from_its_start():
    assert int_in_range("count", 2**70, 0) == 2**70


def test_a_range_without_an_end_has_a_start():
    with pytest.raises(RangeError) as caught:
        int_in_range("count", -1, 0)
    assert str(caught.value) == "count: expected at least 0, got -1."


def test_one_of_the_known():
    one_of("layout", "combined", ("combined", "separate"))


@pytest.mark.parametrize("value", ["paged", "", None, 3])
def test_none_of_the_known(value):
    with raises(ConfigError, "layout", expected="combined, separate", got=repr(value)):
        one_of("layout", value, ("combined", "separate"))


@pytest.mark.parametrize("check", [slot_index, layer_index])
def test_indices_from_zero_up_to_the_count(check):
    assert [check(index, 3) for index in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("index", [3, -1, 2**70])
def test_slots_never_wrap(index):
    with raises(SlotError, f"slot {index}", expected="0 <= slot < 3 (active slots)"):
        slot_index(index, 3, of="active slots")


@pytest.mark.parametrize("index", [3, -1, 2**70])
def test_layers_never_wrap(index):
    with raises(LayerIndexError, f"layer_idx {index}", expected="0 <= layer_idx < 3"):
        layer_index(index, 3, name="layer_idx")


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_an_index_is_an_integer(value):
    for check, error in ((slot_index, SlotError), (layer_index, LayerIndexError)):
        with pytest.raises(error, match="expected an integer, got "):
            check(value, 3)


@pytest.mark.parametrize("value", [(), [3], np.array([3]), np.zeros((2, 2)), range(2)])
def test_sequences(value):
    assert as_sequence("rows", value) is value


@pytest.mark.parametrize("value", ["ab", b"ab", 3, None, {3}, iter([3]), np.array(3), np.int64(3)])
def test_what_is_no_sequence(value):
    with pytest.raises(ShapeError, match=f"^rows: expected a sequence, got {type(value).__name__}"):
        as_sequence("rows", value)
