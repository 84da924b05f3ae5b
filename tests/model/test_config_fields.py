"""Typed access to the fields of a JSON object."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields


def fields(**data: Any) -> ConfigFields:
    return ConfigFields(data)


def test_null_counts_as_absent() -> None:
    assert "x" not in fields(x=None)
    assert fields(x=None).integer("x", 3) == 3


def test_zero_and_false_are_present() -> None:
    assert "x" in fields(x=0)
    assert "x" in fields(x=False)


def test_get_returns_a_field_as_it_is() -> None:
    assert fields(x=[1, "a"]).get("x") == [1, "a"]
    assert fields().get("x") is None


@pytest.mark.parametrize(("method", "value", "expected"), [("integer", 3, 3), ("number", 3, 3.0), ("number", 0.5, 0.5)])
def test_numbers(method: str, value: object, expected: object) -> None:
    found = getattr(fields(x=value), method)("x")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", [True, False])
def test_a_flag(value: bool) -> None:
    assert fields(x=value).flag("x", not value) is value


def test_a_default_is_used_for_an_absent_field() -> None:
    assert fields().integer("x", 5) == 5
    assert fields().number("x", 0.5) == 0.5
    assert fields().flag("x", True) is True


@pytest.mark.parametrize("method", ["integer", "number"])
def test_a_field_without_a_default_is_required(method: str) -> None:
    with raises(ConfigError, "x", "value", "none"):
        getattr(fields(), method)("x")


@pytest.mark.parametrize(("value", "expected"), [(7, (7,)), ([7, 9], (7, 9)), ([], ()), (None, ())])
def test_token_ids(value: object, expected: tuple[int, ...]) -> None:
    assert fields(x=value).token_ids("x") == expected


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        *(("integer", value, f"a positive integer, got {value!r}") for value in (0, -1, 1.0, True, "3")),
        *(("number", value, f"a finite number > 0, got {value!r}") for value in (0, -0.5, True, "3", float("inf"), float("nan"))),
        *(("token_ids", value, f"a token id or a list of token ids, got {value!r}") for value in ("3", 1.5, True, [1, None])),
    ],
)
def test_other_values_are_refused(method: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        getattr(fields(x=value), method)("x")
    assert str(raised.value) == f"x: expected {message}."


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_other_values_than_a_flag_are_refused(value: object) -> None:
    with raises(ConfigError, "x", "true or false"):
        fields(x=value).flag("x", False)


def test_the_prefix_stands_before_the_name() -> None:
    with raises(ConfigError, "rope.x", expected="positive integer", got=0):
        ConfigFields({"x": 0}, "rope.").integer("x")
