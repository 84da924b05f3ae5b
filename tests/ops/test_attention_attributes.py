"""The fields of a plugin."""

import enum
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError
from trt_kvcache.kernels.attention_params import score_factors
from trt_kvcache.kernels.attention_tiles import MAX_SCORE_FACTOR, MIN_SCORE_FACTOR
from trt_kvcache.ops.attention_attributes import ATTRIBUTE_TYPES, KV_FIELD_VALUES, QUANTIZED_ATTRIBUTE_TYPES
from trt_kvcache.trt.plugin import AttentionAttributes

Kind = enum.Enum("Kind", "INT32 INT64 FLOAT32 FLOAT64 CHAR")
LEAST = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80}


def field(name, kind, *values):
    return SimpleNamespace(name=name, type=Kind[kind], data=np.array(values))


def test_attributes_are_read_back_from_plugin_fields():
    fields = AttentionAttributes(**LEAST, scale=0.1, window=33, softcap=30.5, rotary_dim=20)
    stored = fields.plugin_field_arrays()
    assert {name: array.dtype.name.upper() for name, array in stored.items()} == ATTRIBUTE_TYPES
    assert AttentionAttributes.from_plugin_fields(field(name, ATTRIBUTE_TYPES[name], *array) for name, array in stored.items()) == fields


@pytest.mark.parametrize("kv_dtype", KV_FIELD_VALUES["kv_dtype"])
@pytest.mark.parametrize("kv_scales", KV_FIELD_VALUES["kv_scales"])
def test_how_k_and_v_are_quantized_is_read_back(kv_dtype, kv_scales):
    attributes = AttentionAttributes(**LEAST, kv_dtype=kv_dtype, kv_scales=kv_scales)
    stored = attributes.plugin_field_arrays()
    assert {name: array.dtype.name.upper() for name, array in stored.items()} == QUANTIZED_ATTRIBUTE_TYPES
    fields = [field(name, QUANTIZED_ATTRIBUTE_TYPES[name], *array) for name, array in stored.items()]
    assert AttentionAttributes.from_plugin_fields(fields, quantized=True) == attributes
    with raises(ConfigError, "field 'kv_dtype' is unknown", expected=("num_heads", "rotary_dim, each once")):
        AttentionAttributes.from_plugin_fields(fields)  # those of 16 bits have no such field


_QUANTIZED = [field(name, "INT32", value) for name, value in LEAST.items()]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ([], ("fields", "kv_dtype, kv_scales too", "num_heads, num_kv_heads, head_dim")),
        ([field("kv_dtype", "INT32", 1)], ("fields", "kv_scales too", "num_heads, num_kv_heads, head_dim, kv_dtype")),
        (
            [field("kv_dtype", "INT32", 0), field("kv_scales", "INT32", 1)],
            ("field 'kv_dtype'", "1 (float8_e4m3fn) or 2 (int8)", 0),
        ),
        ([field("kv_dtype", "INT32", 2), field("kv_scales", "INT32", 3)], ("field 'kv_scales'", "1 (head) or 2 (token)", 3)),
        (
            [field("kv_dtype", "CHAR", 105, 110, 116, 56), field("kv_scales", "INT32", 1)],
            ("field 'kv_dtype'", "one value of type INT32 or INT64", "4 of type CHAR"),
        ),
    ],
)
def test_plugin_fields_of_quantized_k_and_v_that_are_refused(fields, parts):
    with raises(ConfigError, *parts):
        AttentionAttributes.from_plugin_fields([*_QUANTIZED, *fields], quantized=True)


def test_attributes_with_a_default_may_be_left_out():
    fields = AttentionAttributes.from_plugin_fields(field(name, "INT64", value) for name, value in LEAST.items())
    assert (fields.scale, fields.window, fields.softcap, fields.rotary_dim) == (0, 0, 0, 0)
    assert (fields.group, fields.score_scale) == (3, 80**-0.5)
    taken = AttentionAttributes(**LEAST, scale=np.float32(0.25), window=np.int64(3))
    assert repr((taken.score_scale, taken.window)) == "(0.25, 3)"


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ([], ("fields", "num_heads, num_kv_heads, head_dim too", "none")),
        ([field("head_dim", "INT32", 64)], ("fields", "num_heads, num_kv_heads too", "head_dim")),
        ([field("heads", "INT32", 2)], ("field 'heads' is unknown", "num_heads")),
        ([field("window", "INT32", 2)] * 2, ("field 'window' is given twice", "num_heads")),
        ([field("window", "FLOAT32", 2)], ("field 'window'", "one value of type INT32 or INT64", "1 of type FLOAT32")),
        ([field("scale", "INT32", 2)], ("field 'scale'", "one value of type FLOAT32 or FLOAT64", "1 of type INT32")),
        ([field("window", "INT32", 2, 3)], ("field 'window'", "one value of type INT32 or INT64", "2 of type INT32")),
    ],
)
def test_plugin_fields_that_are_refused(fields, parts):
    with raises(ConfigError, *parts):
        AttentionAttributes.from_plugin_fields(fields)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"num_heads": 5}, ("num_heads", "1 to 16 times num_kv_heads", "5 over 2 K/V heads")),
        ({"num_heads": 34}, ("num_heads", "1 to 16 times num_kv_heads", "34 over 2 K/V heads")),
        ({"num_heads": 0}, ("num_heads", "1 to 16 times num_kv_heads", "0 over 2 K/V heads")),
        ({"num_kv_heads": 0}, ("num_heads", "1 to 16 times num_kv_heads", "6 over 0 K/V heads")),
        ({"head_dim": 72}, ("head_dim", "64, 80, 96, 128, 256, 512", 72)),
        ({"window": -1}, ("window", "0 to 2147483647", -1)),
        ({"window": 2**31}, ("window", "0 to 2147483647", 2147483648)),
        *[
            ({name: value}, (f"{name}", "0, or 1e-06 to 1000000.0", f"{value}"))
            for name, value in (("scale", -0.5), ("scale", True), ("scale", 1e-38), ("softcap", float("inf")), ("softcap", float("nan")))
        ],
        ({"rotary_dim": 6}, ("rotary_dim", "multiple of 4 from 0 to 80", 6)),
        ({"rotary_dim": 84}, ("rotary_dim", "multiple of 4 from 0 to 80", 84)),
        ({"kv_dtype": "fp8", "kv_scales": "head"}, ("kv_dtype", "float8_e4m3fn, int8", "'fp8'")),
        ({"kv_dtype": "int8", "kv_scales": "tensor"}, ("kv_scales", "head, token", "'tensor'")),
        ({"kv_dtype": "int8"}, ("kv_scales", "head, token", "None")),
        ({"kv_scales": "head"}, ("kv_scales", "none without kv_dtype", "'head'")),
    ],
)
def test_values_out_of_range_are_refused(changed, parts):
    with raises(ConfigError, *parts):
        AttentionAttributes(**LEAST | changed)


_FACTORS = st.floats(MIN_SCORE_FACTOR, MAX_SCORE_FACTOR)


@given(scale=_FACTORS, softcap=st.one_of(st.just(0.0), _FACTORS))
def test_scale_and_softcap_of_an_onnx_attribute_reach_the_kernel_within_float32_rounding(scale, softcap):
    """The network API stores doubles and ONNX float32; the kernel reads float32 factors that are made of them."""
    exact = AttentionAttributes(**LEAST, scale=scale, softcap=softcap)
    fields = [field(name, "FLOAT32", np.float32(value)) for name, value in (("scale", scale), ("softcap", softcap))]
    rounded = AttentionAttributes.from_plugin_fields([*fields, *(field(name, "INT32", value) for name, value in LEAST.items())])
    factors = [np.float32(score_factors(one.score_scale, one.softcap)) for one in (exact, rounded)]
    # Two roundings at most of the attributes, and one of each factor, of half a unit in the last place.
    np.testing.assert_allclose(factors[1], factors[0], rtol=4 * 2.0**-24, atol=0)


@pytest.mark.parametrize("kv", [{}, {"kv_dtype": "int8", "kv_scales": "head"}], ids=["16 bits", "quantized"])
def test_attention_of_trees_has_no_field_for_them(kv):
    """The version of the plugin says so."""
    attributes = AttentionAttributes(**LEAST, **kv, takes_trees=True)
    stored = attributes.plugin_field_arrays()
    assert stored.keys() == {*ATTRIBUTE_TYPES, *kv}
    fields = [field(name, QUANTIZED_ATTRIBUTE_TYPES[name], *array) for name, array in stored.items()]
    assert AttentionAttributes.from_plugin_fields(fields, quantized=bool(kv), takes_trees=True) == attributes
