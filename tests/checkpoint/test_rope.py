import math

import numpy as np
import pytest

from trt_kvcache.checkpoint import RopeConfig, rope_table
from trt_kvcache.errors import ConfigError

RAMP = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 300.0, **RAMP}
LINEAR = {"type": "linear", "factor": 2.0}


def default(theta):
    return RopeConfig(kind="default", theta=theta)


def read(**config):
    return RopeConfig.from_dict(config, max_position_embeddings=128)


def test_default_table_by_hand():
    angles = np.array([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    for table, function in zip(rope_table(default(100.0), head_dim=4, length=3), (np.cos, np.sin), strict=True):
        assert table.dtype == np.float32
        np.testing.assert_array_equal(table, function(angles).astype(np.float32))


def test_a_long_table_is_precise():
    cos, _ = rope_table(default(500000.0), head_dim=128, length=131072)  # in float32 the angle itself would be off by 0.004
    assert cos[-1, 1] == pytest.approx(math.cos(131071 * 500000.0 ** (-2 / 128)), abs=1e-6)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_mixes_between():
    # With theta 4**4 and head_dim 8 the wavelengths are 2 pi times 1, 4, 16, 64.
    rope = RopeConfig(kind="llama3", theta=256.0, **{**RAMP, "factor": 10.0, "original_max_position_embeddings": 64})
    _, sin = rope_table(rope, head_dim=8, length=2)
    turns = 64 / (2 * math.pi * 4)  # of the second frequency over the original context
    mixed = (turns - 1) / 3 * 0.25 + (4 - turns) / 3 * 0.025
    np.testing.assert_allclose(np.arcsin(sin[1]), [1.0, mixed, 1 / 160, 1 / 640], rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, default(10000.0)),
        ({"rope_parameters": {"rope_theta": 8.0}, "rope_theta": 7.0}, default(8.0)),
        ({"rope_theta": 7.0, "rope_scaling": LINEAR}, RopeConfig(kind="linear", theta=7.0, factor=2.0)),
        ({"rope_parameters": LLAMA3}, RopeConfig(kind="llama3", theta=300.0, **RAMP)),
    ],
)
def test_spellings_and_back(config, expected):
    assert read(**config) == expected
    assert read(rope_parameters=expected.to_dict()) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: RoPE scaling 'yarn' is not supported. Supported: default, linear, llama3."),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "got one per layer type: full_attention"),
        ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 17}, "expected one value, got 17 and, in rope_parameters, 16"),
        ({"rope_scaling": {**LINEAR, "rope_type": "default"}}, "rope_scaling: expected `rope_type` and `type` to agree"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor: expected more than low_freq_factor=1.0, got 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 .*, got 0.5"),
    ],
)
def test_what_makes_no_sense_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        read(**config)
