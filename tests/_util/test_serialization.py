"""Configurations read back from plain values. Those of the package: tests/cache and tests/engine_folder."""

from dataclasses import dataclass

import pytest

from tests.helpers.assertions import raises
from trt_kvcache._util.serialization import config_from_dict
from trt_kvcache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    sizes: tuple
    name: str = "any"

    def __post_init__(self):
        if not self.sizes:
            raise ConfigError("Config.sizes: expected at least one, got none.")


def read(data):
    return config_from_dict(Config, data, sizes=lambda sizes: tuple(int(size) for size in sizes))


def test_values_as_they_are_stored():
    assert config_from_dict(Config, {"sizes": (1,), "name": "x"}) == Config(sizes=(1,), name="x")


def test_values_that_a_reader_turns_into_others():
    assert read({"sizes": ["1", 2]}) == Config(sizes=(1, 2))


def test_what_was_read_is_not_changed():
    data = {"sizes": ["1", 2]}
    read(data)
    assert data == {"sizes": ["1", 2]}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "a missing or unknown field ('sizes')."),
        ({"sizes": [1], "colour": 3}, "a missing or unknown field (Config.__init__() got an unexpected keyword argument 'colour')."),
        ({"sizes": 3}, "a missing or unknown field ('int' object is not iterable)."),
        (None, "a missing or unknown field ('NoneType' object is not iterable)."),
    ],
)
def test_fields_that_are_missing_or_unknown(data, text):
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert str(caught.value) == f"Config: the stored form has {text}"


def test_a_value_that_cannot_be_read():
    with pytest.raises(ConfigError, match=r"^Config: invalid literal for int\(\) with base 10: 'x'\.$"):
        read({"sizes": ["x"]})


def test_what_the_configuration_itself_refuses_is_said_as_it_says_it():
    with raises(ConfigError, "Config.sizes", expected="at least one", got="none"):
        read({"sizes": []})
