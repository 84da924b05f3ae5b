from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.paths import GOLDEN
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import RopeConfig, rope_table

PROPORTIONAL = RopeConfig(kind="proportional", theta=9.0, partial_rotary_factor=0.25)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def read(**config: Any) -> RopeConfig:
    return RopeConfig.from_dict(config, max_position_embeddings=128)


def test_default_table_by_hand() -> None:
    cos, sin = rope_table(RopeConfig(kind="default", theta=100.0), head_dim=4, length=3)
    angles = np.array([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos, np.cos(angles).astype(np.float32))
    np.testing.assert_array_equal(sin, np.sin(angles).astype(np.float32))


def test_linear_divides_positions() -> None:
    scaled = rope_table(RopeConfig(kind="linear", theta=100.0, factor=2.0), head_dim=6, length=9)
    plain = rope_table(RopeConfig(kind="default", theta=100.0), head_dim=6, length=5)
    for side in (0, 1):
        np.testing.assert_allclose(scaled[side][::2], plain[side], atol=1e-6)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_mixes_between() -> None:
    # With theta 4**4 and head_dim 8 the wavelengths are 2 pi times 1, 4, 16, 64.
    rope = RopeConfig(
        kind="llama3", theta=256.0, factor=10.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    _, sin = rope_table(rope, head_dim=8, length=2)
    turns = 64 / (2 * math.pi * 4)  # of the second frequency over the original context
    mixed = (turns - 1) / 3 * 0.25 + (4 - turns) / 3 * 0.025
    np.testing.assert_allclose(np.arcsin(sin[1]), [1.0, mixed, 1 / 160, 1 / 640], rtol=1e-5)


def test_a_long_table_is_precise() -> None:
    """In float32 the angle itself would be off by 0.004 there."""
    position = 131071
    cos, _ = rope_table(RopeConfig(kind="default", theta=500000.0), head_dim=128, length=position + 1)
    assert cos[position, 1] == pytest.approx(math.cos(position * 500000.0 ** (-2 / 128)), abs=1e-6)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig(kind="default", theta=10000.0)),
        ({"rope_theta": 7.0}, RopeConfig(kind="default", theta=7.0)),
        ({"rope_theta": 7, "rope_scaling": None}, RopeConfig(kind="default", theta=7.0)),
        ({"rope_parameters": {"rope_theta": 8.0}, "rope_theta": 7.0}, RopeConfig(kind="default", theta=8.0)),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(kind="linear", theta=7.0, factor=2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            RopeConfig(kind="linear", theta=10000.0, factor=2.0),
        ),
        (
            {"rope_parameters": LLAMA3},
            RopeConfig(
                kind="llama3",
                theta=300.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        ),
    ],
)
def test_spellings(config: dict[str, Any], expected: RopeConfig) -> None:
    assert read(**config) == expected


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("top", [{}, {"original_max_position_embeddings": 32}], ids=["nowhere", "beside the scaling"])
def test_llama3_without_its_context_length_in_the_scaling_takes_that_of_the_model(top: dict[str, Any], spelling: str) -> None:
    """As LlamaConfig of transformers 5.23 does: it looks for the field in the scaling only."""
    scaling = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
    assert read(**{spelling: scaling}, **top).original_max_position_embeddings == 128


@pytest.mark.parametrize(
    "rope",
    [RopeConfig(kind="default", theta=9.0), RopeConfig(kind="linear", theta=9.0, factor=3.0), read(rope_scaling=LLAMA3), PROPORTIONAL],
)
def test_to_dict_is_read_back(rope: RopeConfig) -> None:
    assert read(rope_parameters=rope.to_dict()) == rope


@pytest.mark.parametrize("kind", ["mrope", "axial"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"rope_scaling: RoPE scaling '{kind}' is not supported. Supported: default, linear, dynamic, "):
        read(rope_scaling={"type": kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: expected a value, got none"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor: expected a finite number > 0, got '2'"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
            "rope_scaling: expected `rope_type` and `type` to agree",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, "rope_scaling: expected only .*, got alpha as well"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 3.0}},
            "expected one of them, or the same in both",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "got one per layer type: full_attention"),
        ({"rope_parameters": 3}, "rope_parameters: expected an object, got 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 .*, got 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"rope_parameters\.partial_rotary_factor: expected 1 .*, got 0.25"),
        ({"rope_theta": -1}, "rope_theta: expected a finite number > 0, got -1"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor: expected more than low_freq_factor=1.0, got 1.0"),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 17}, "expected one value, got 17 and, in rope_parameters, 16"),
    ],
)
def test_contradictory_fields_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**config)


@pytest.mark.parametrize(("head_dim", "length"), [(5, 3), (0, 3), (4, -1)])
def test_a_table_needs_an_even_head_and_a_length(head_dim: int, length: int) -> None:
    with pytest.raises(ConfigError, match="rope_table: expected"):
        rope_table(RopeConfig(kind="default", theta=10.0), head_dim, length)


def test_the_constructor_checks_its_values() -> None:
    with raises(ConfigError, "RopeConfig.kind", expected="default, linear", got="'mrope'"):
        RopeConfig(kind="mrope", theta=1.0)
    with raises(ConfigError, "RopeConfig.theta", expected="finite number > 0", got="0.0"):
        RopeConfig(kind="default", theta=0.0)


GOLDEN_ROPES = json.loads((GOLDEN / "rope.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GOLDEN_ROPES)
def test_angles_are_those_of_transformers(name: str) -> None:
    golden = GOLDEN_ROPES[name]
    rope = RopeConfig.from_dict({"rope_parameters": golden["rope_parameters"]}, max_position_embeddings=64)
    cos, sin = rope_table(rope, head_dim=16, length=golden["length"])
    found = np.arctan2(sin[1], cos[1])
    np.testing.assert_allclose(found, golden["frequencies"], rtol=1e-5)  # theirs are computed in float32
    np.testing.assert_allclose(np.hypot(cos, sin), golden["factor"], rtol=1e-6)


def test_part_of_a_head_has_the_frequencies_of_a_smaller_one() -> None:
    part = RopeConfig(kind="default", theta=100.0, partial_rotary_factor=0.5)
    for found, expected in zip(rope_table(part, 16, 9), rope_table(RopeConfig(kind="default", theta=100.0), 8, 9), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_family_may_call_a_kind_otherwise() -> None:
    config = {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}
    rope = RopeConfig.from_dict(config, max_position_embeddings=64, original_max_position_embeddings=16, other_kinds={"su": "longrope"})
    assert (rope.kind, rope.factor, rope.long_factor) == ("longrope", 4.0, (2.0,))


@pytest.mark.parametrize(
    ("length", "expected"),
    [(32, {"is_long": False}), (33, {"is_long": True})],
)
def test_keys_of_longrope_are_compared_by_their_factors(length: int, expected: dict[str, Any]) -> None:
    rope = RopeConfig(kind="longrope", theta=9.0, original_max_position_embeddings=32, short_factor=(1.0,), long_factor=(2.0,))
    assert rope.at_length(length) == {**rope.to_dict(), **expected}


def test_keys_of_dynamic_rope_are_compared_by_the_length_of_the_cache() -> None:
    rope = RopeConfig(kind="dynamic", theta=9.0, factor=2.0, original_max_position_embeddings=32)
    assert rope.at_length(7) == rope.at_length(32) != rope.at_length(33)


@pytest.mark.parametrize(
    ("rope", "head_dim", "message"),
    [
        (RopeConfig(kind="default", theta=9.0, partial_rotary_factor=0.2), 16, "partial_rotary_factor: expected an even number .*, got 3"),
        (RopeConfig(kind="dynamic", theta=9.0), 2, "expected an even number of 4 or more of the 2 elements of a head, got 2"),
        (RopeConfig(kind="longrope", theta=9.0, short_factor=(1.0,) * 8), 16, "long_factor: expected 8 factors, .*, got 0"),
    ],
)
def test_heads_that_do_not_fit_are_refused(rope: RopeConfig, head_dim: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope.check_head_dim(head_dim)
