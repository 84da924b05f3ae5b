"""Values in error messages: their length, and values that Python refuses to print."""

import pytest

from trt_kvcache._util.short_repr import short_repr


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, 1.5, "a text", [1, 2], {"a": (1,)}, "x" * 198])
def test_a_short_value_is_shown_as_python_does(value):
    assert short_repr(value) == repr(value)


def test_a_long_value_is_cut():
    text = short_repr(list(range(10_000)))
    assert text.startswith("[0, 1, 2, 3,")
    assert text.endswith("... (58890 characters)")
    assert len(text) < 300


def test_of_a_long_object_only_the_size_is_shown():
    assert short_repr({"depth": 32, "hidden_size": 1280}) == "{'depth': 32, 'hidden_size': 1280}"
    assert short_repr(dict.fromkeys(range(99), "x")) == "an object with 99 fields"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**5000, "an int that is too large to print"),
        (-(10**5000), "an int that is too large to print"),
        ([1, 10**5000], "a list that cannot be printed"),
        (nested(100_000), "a list that is nested too deeply to print"),
    ],
    ids=["huge", "huge and negative", "huge in a list", "nested"],
)
def test_a_value_that_python_refuses_to_print_is_named(value, text):
    assert short_repr(value) == text
