"""``raises`` of the helpers: an error of another type or about another object, or that names other values, fails the test."""

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import DTypeError, RangeError, ShapeError

MESSAGE = "q.scale: expected float32 [3, 16] or a number from 0 to 10, got float16 [3, 160]. Give 7 numbers."


def fails(expectation, message=MESSAGE, error=ShapeError):
    with pytest.raises(AssertionError), expectation:
        raise error(message)


def test_an_error_that_names_all_parts_in_any_words():
    with raises(ShapeError, "q.scale", expected=("[3, 16]", "0 to 10", "float32"), got=("[3, 160]", "float16")) as caught:
        raise ShapeError(MESSAGE)
    assert str(caught.value) == MESSAGE
    with raises(ShapeError, "q.scale", expected="0 to 10", says=7):
        raise ShapeError(MESSAGE)


@pytest.mark.parametrize("named", ["k.scale", "scale", "q", "float32"])
def test_another_object(named):
    fails(raises(ShapeError, named))


@pytest.mark.parametrize("expected", ["float16", "[3, 160]", 1, "0 to 1", ("float32", "int8"), 7])
def test_another_expected_value(expected):
    fails(raises(ShapeError, "q.scale", expected=expected))


@pytest.mark.parametrize("got", ["float32", "[3, 16]", 16, 60, ("float16", "[3, 161]"), 7])
def test_another_value_that_it_got(got):
    fails(raises(ShapeError, "q.scale", expected="[3, 16]", got=got))


@pytest.mark.parametrize(("got", "value"), [("-1", 1), ("1.5", 1), ("1.5", 5), ("1e3", 1), ("None", "No")])
def test_a_part_of_a_number_or_word_is_not_the_value(got, value):
    fails(raises(ShapeError, "slot", got=value), f"slot: expected 0 to 3, got {got}.")


def test_a_message_without_the_parts():
    fails(raises(ShapeError, "q", expected=3), "q is wrong")
    fails(raises(ShapeError, "q", expected=3, got=4), "q: expected 3 of 4")
    fails(raises(ShapeError, "q", says="closed"), "q is open")


def test_another_type_is_not_caught():
    with pytest.raises(DTypeError), raises(ShapeError, "q.scale"):
        raise DTypeError(MESSAGE)


def test_a_call_that_raises_nothing_fails():
    with pytest.raises(pytest.fail.Exception, match="RangeError"), raises(RangeError, "q.scale"):
        pass
