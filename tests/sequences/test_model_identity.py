"""``ModelIdentity``: which model the K, V and states of a snapshot belong to."""

import dataclasses

import numpy as np
import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError
from trt_kvcache.sequences.model_identity import ModelIdentity


def test_equal_by_value():
    assert ModelIdentity(fingerprint="x", rope={"a": 1}) == ModelIdentity(fingerprint="x", rope={"a": 1})


@pytest.mark.parametrize(("fingerprint", "rope"), [("y", {"a": 1}), ("x", {"a": 2}), ("x", None)])
def test_different_in_any_part(fingerprint, rope):
    assert ModelIdentity(fingerprint="x", rope={"a": 1}) != ModelIdentity(fingerprint=fingerprint, rope=rope)


def test_an_adapter_is_a_part_of_it():
    assert ModelIdentity(fingerprint="x", adapter="a") != ModelIdentity(fingerprint="x")
    with raises(ConfigError, "ModelIdentity.adapter", expected="text", got="3"):
        ModelIdentity(fingerprint="x", adapter=3)


def test_rope_is_compared_as_json_stores_it():
    assert ModelIdentity(fingerprint="x", rope={"a": (1, 2), 3: None}) == ModelIdentity(fingerprint="x", rope={"a": [1, 2], "3": None})


def test_rope_is_kept_whatever_becomes_of_the_mapping():
    rope = {"a": [1]}
    identity = ModelIdentity(fingerprint="x", rope=rope)
    rope["a"].append(2)
    assert identity.rope == {"a": [1]}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelIdentity(fingerprint="x").fingerprint = "y"


@pytest.mark.parametrize("fingerprint", ["", None, 3, b"x"])
def test_a_fingerprint_is_a_text(fingerprint):
    with raises(ConfigError, "ModelIdentity.fingerprint", expected="text", got=repr(fingerprint)):
        ModelIdentity(fingerprint=fingerprint)


@pytest.mark.parametrize("rope", ["linear", [1]])
def test_rope_is_a_mapping(rope):
    with raises(ConfigError, "ModelIdentity.rope", expected="Mapping"):
        ModelIdentity(fingerprint="x", rope=rope)


@pytest.mark.parametrize("value", [{1}, np.inf, np.float32(1), object()], ids=["a set", "infinity", "a NumPy float", "an object"])
def test_rope_holds_json_values(value):
    with raises(ConfigError, "ModelIdentity.rope", expected="JSON values"):
        ModelIdentity(fingerprint="x", rope={"a": value})


def test_rope_does_not_hold_itself():
    rope = {}
    rope["a"] = rope
    with raises(ConfigError, "ModelIdentity.rope", expected="JSON values"):
        ModelIdentity(fingerprint="x", rope=rope)
