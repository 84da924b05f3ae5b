"""``KVLayerConfig``, ``KVCacheConfig`` and ``CacheConfig``: what they hold, how many bytes, and which fields they refuse."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.cache.scene import KV_CONFIGS
from tests.helpers.assertions import raises
from trt_kvcache import (
    CacheConfig,
    HostMemory,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LinearKVCache,
    MambaCacheConfig,
    estimate_memory,
)
from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError

LAYER = KVLayerConfig(num_kv_heads=2, head_dim=16)
KV = {"layers": [LAYER], "max_batch_size": 3, "max_sequence_length": 7}
LINEAR = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}
MAMBA = {"num_layers": 2, "max_batch_size": 3, "num_heads": 2, "head_dim": 3, "state_size": 5, "conv_dim": 7, "conv_kernel": 4}
#: The same states in a CacheConfig.
LINEAR_STATES = {"num_mamba_layers": 2, "mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 5, "conv_dim": 7, "conv_kernel": 4}
INT32_MAX, MAX_SLOTS, MAX_LAYERS = 2147483647, 65535, 10_000
#: Bytes of the array that kernels read: five words for a K/V layer, three for a state.
KV_INFO, STATE_INFO = 40, 24


def test_defaults():
    kv = KVCacheConfig(**KV)
    assert (kv.dtype, kv.layout) == ("float16", KVLayout.SEPARATE)
    assert (LAYER.k_scale, LAYER.v_scale) == (1.0, 1.0)
    linear = CacheConfig(**LINEAR)
    assert (linear.dtype, linear.layout, linear.num_mamba_layers, linear.mamba) == ("float16", KVLayout.SEPARATE, 0, None)


CONFIGS = [LAYER, KVCacheConfig(**KV), CacheConfig(**LINEAR)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_frozen_keyword_only_and_equal_by_value(config):
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, getattr(config, field))
    with pytest.raises(TypeError):
        type(config)(getattr(config, field))
    twin = dataclasses.replace(config)
    assert (twin, hash(twin)) == (config, hash(config))
    other = dataclasses.fields(config)[1].name
    assert dataclasses.replace(config, **{other: 32}) != config


def test_layers_are_kept_as_a_tuple_whatever_sequence_came():
    layers = [LAYER, KVLayerConfig(num_kv_heads=1, head_dim=32)]
    kv = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7)
    layers.append(LAYER)
    assert kv.layers == (LAYER, KVLayerConfig(num_kv_heads=1, head_dim=32))
    assert kv.num_layers == 2
    assert KVCacheConfig(**{**KV, "layers": iter([LAYER, LAYER])}).num_layers == 2


def test_is_uniform_looks_at_heads_and_head_dim():
    def uniform(*layers):
        return KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7).is_uniform

    assert uniform(LAYER)
    assert uniform(LAYER, dataclasses.replace(LAYER, k_scale=2.0))
    assert not uniform(LAYER, dataclasses.replace(LAYER, num_kv_heads=1))
    assert not uniform(LAYER, dataclasses.replace(LAYER, head_dim=32))


def test_numbers_come_as_plain_python_numbers():
    layer = KVLayerConfig(num_kv_heads=np.int64(2), head_dim=np.int32(16), k_scale=np.float32(0.5), v_scale=2)
    kv = KVCacheConfig(layers=[layer], max_batch_size=np.int8(3), max_sequence_length=np.uint16(7))
    values = (layer.num_kv_heads, layer.head_dim, layer.k_scale, layer.v_scale, kv.max_batch_size, kv.max_sequence_length)
    assert values == (2, 16, 0.5, 2.0, 3, 7)
    assert [type(value) for value in values] == [int, int, float, float, int, int]


# B=3, S=7. Sizes by hand: see test_layout.py for one layer of (2, 16).
NBYTES = [
    # dtype, layout, layers (heads, head_dim), bytes of K/V, bytes of scales
    ("float16", KVLayout.COMBINED, [(2, 16)], [2816], 0),
    ("float16", KVLayout.SEPARATE, [(2, 16)], [3072], 0),
    ("float16", KVLayout.SEPARATE, [(2, 16), (1, 32), (3, 8)], [3072, 3072, 2 * 1024], 0),
    ("bfloat16", KVLayout.COMBINED, [(2, 16), (3, 8)], [2816, 2048], 0),
    ("float32", KVLayout.COMBINED, [(2, 16)], [5376], 0),
    ("float8_e4m3fn", KVLayout.SEPARATE, [(2, 16)], [1536], 256),
    ("int8", KVLayout.COMBINED, [(2, 16), (33, 16)], [1536, 22272], 256 + 512),  # 33 * 2 * 4 = 264 -> 512
]


@pytest.mark.parametrize(("dtype", "layout", "layers", "layer_nbytes", "scales_nbytes"), NBYTES)
def test_bytes_by_hand(dtype, layout, layers, layer_nbytes, scales_nbytes):
    layers = [KVLayerConfig(num_kv_heads=heads, head_dim=head_dim) for heads, head_dim in layers]
    kv = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=7, dtype=dtype, layout=layout)
    assert [storage.nbytes for storage in kv.storages] == layer_nbytes
    assert kv.scales_nbytes == scales_nbytes
    assert kv.has_scales is (scales_nbytes > 0)
    assert kv.nbytes == sum(layer_nbytes) + scales_nbytes


@pytest.mark.parametrize("kind", [KVCacheConfig, CacheConfig])
def test_a_short_name_of_a_dtype_becomes_its_name(kind):
    layers = (
        {"layers": [KVLayerConfig(num_kv_heads=2, head_dim=16)]}
        if kind is KVCacheConfig
        else {"num_attention_layers": 2, "num_kv_heads": 2, "head_dim": 16}
    )
    short, full = (kind(**layers, max_batch_size=3, max_sequence_length=7, dtype=name) for name in ("fp8", "float8_e4m3fn"))
    assert short == full
    assert short.dtype == "float8_e4m3fn"


@given(KV_CONFIGS)
def test_bytes_are_what_a_manager_allocates(kv):
    memory = HostMemory()
    with KVCacheManager(kv, memory=memory) as cache:
        assert memory.live_nbytes == kv.nbytes + cache.lengths.nbytes + KV_INFO * kv.num_layers
        assert cache.nbytes == kv.nbytes == estimate_memory(kv).nbytes
    assert memory.live_nbytes == 0


@given(KV_CONFIGS, st.integers(1, 4))
def test_bytes_are_what_a_linear_cache_allocates(kv, layers):
    config = CacheConfig(
        num_attention_layers=layers,
        max_batch_size=kv.max_batch_size,
        max_sequence_length=kv.max_sequence_length,
        num_kv_heads=kv.layers[0].num_kv_heads,
        head_dim=kv.layers[0].head_dim,
        dtype=kv.dtype,
        layout=kv.layout,
        **LINEAR_STATES,
    )
    memory = HostMemory()
    with LinearKVCache(config, memory=memory) as cache:
        infos = KV_INFO * layers + STATE_INFO * 2 * 2
        assert memory.live_nbytes == config.nbytes + cache.lengths.nbytes + infos
        assert config.nbytes == config.kv.nbytes + config.mamba.nbytes
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes
    assert memory.live_nbytes == 0


@given(KV_CONFIGS)
def test_a_stored_config_is_read_back(kv):
    assert KVCacheConfig.from_dict(json.loads(json.dumps(kv.to_dict()))) == kv


def test_the_stored_form():
    kv = KVCacheConfig(
        layers=[LAYER, KVLayerConfig(num_kv_heads=1, head_dim=32, k_scale=0.5, v_scale=0.25)],
        max_batch_size=3,
        max_sequence_length=7,
        dtype="int8",
        layout=KVLayout.COMBINED,
    )
    assert kv.to_dict() == {
        "layers": [
            {"num_kv_heads": 2, "head_dim": 16, "k_scale": 1.0, "v_scale": 1.0},
            {"num_kv_heads": 1, "head_dim": 32, "k_scale": 0.5, "v_scale": 0.25},
        ],
        "max_batch_size": 3,
        "max_sequence_length": 7,
        "dtype": "int8",
        "layout": "combined",
        "scales": "tensor",
    }


def test_scales_by_head_are_stored_and_read_back():
    layer = KVLayerConfig(num_kv_heads=2, head_dim=16, k_scale=np.array([0.5, 2], np.float32), v_scale=(1, 3))
    assert (layer.k_scale, layer.v_scale, layer.head_scales) == ((0.5, 2.0), (1.0, 3.0), ((0.5, 2.0), (1.0, 3.0)))
    kv = KVCacheConfig(**{**KV, "layers": [layer, LAYER]}, dtype="int8")
    assert kv.scales == "head"
    assert KVCacheConfig.from_dict(json.loads(json.dumps(kv.to_dict()))) == kv


def test_what_was_stored_without_a_choice_of_scales_is_read():
    for dtype, scales in (("float16", None), ("int8", "tensor")):
        stored = KVCacheConfig(**KV, dtype=dtype).to_dict()
        del stored["scales"]
        assert KVCacheConfig.from_dict(stored).scales == scales


@pytest.mark.parametrize("owner", ["KVCacheConfig", "CacheConfig"])
def test_scales_that_do_not_fit(owner):
    def make(**fields):
        layer = {name: fields.pop(name) for name in ("k_scale", "v_scale") if name in fields}
        if owner == "CacheConfig":
            return CacheConfig(**LINEAR, **layer, **fields)
        return KVCacheConfig(**{**KV, "layers": [dataclasses.replace(LAYER, **layer)]}, **fields)

    for fields, expected, got in (
        ({"scales": "token"}, ("None", "float16"), "'token'"),
        ({"scales": "row", "dtype": "int8"}, "tensor, head, token", "'row'"),
        ({"scales": 3, "dtype": "int8"}, "tensor, head, token", 3),
        ({"scales": "tensor", "dtype": "int8", "k_scale": [1, 2]}, ("'head'", "each head"), "'tensor'"),
        ({"scales": "token", "dtype": "int8", "v_scale": 2}, ("'tensor'", "'head'"), "'token'"),
    ):
        with raises(ConfigError, f"{owner}.scales", expected, got):
            make(**fields)
    for value, name, expected, got in (
        ([1.0], "k_scale", "2 heads", 1),
        ([1.0, 0.0], "k_scale[1]", "finite float32 above 0", "0.0"),
        (np.ones((2, 2)), "k_scale[0]", "finite float32 above 0", "[1.0, 1.0]"),
    ):
        with raises(ConfigError, f"KVLayerConfig.{name}", expected, got):
            make(dtype="int8", k_scale=value)


def test_a_linear_config_describes_its_recurrent_layers():
    assert CacheConfig(**LINEAR, **LINEAR_STATES).mamba == MambaCacheConfig(**MAMBA)


def test_a_linear_config_layer_by_layer():
    config = CacheConfig(**LINEAR, dtype="int8", k_scale=0.5, v_scale=0.25, layout=KVLayout.COMBINED)
    assert config.num_layers == 4
    assert config.kv == KVCacheConfig(
        layers=[KVLayerConfig(num_kv_heads=2, head_dim=16, k_scale=0.5, v_scale=0.25)] * 4,
        max_batch_size=3,
        max_sequence_length=7,
        dtype="int8",
        layout=KVLayout.COMBINED,
    )
    assert config.nbytes == 4 * (1536 + 256)


def _integers(name, high):
    wrong = [(value, f"1 to {high}", value) for value in (0, -1, high + 1)]
    wrong += [(value, "integer", repr(value)) for value in (2.0, True, "2", None)]
    wrong += [(10**5000, f"1 to {high}", "too large to print")]
    return [(value, (name, expected, got)) for value, expected, got in wrong]


def _scales(name):
    wrong = [0, 0.0, -1.0, float("nan"), float("inf"), 1e300, 10**400, 10**5000, 1e-60, True, "1.0", None]
    return [(value, (name, "finite float32 above 0", short_repr(value))) for value in wrong]


DTYPES = [
    (value, ("dtype", "float16, bfloat16, float32, float8_e4m3fn, int8", repr(value)))
    for value in ("float64", "int32", "", None, np.float16)
]

LAYOUTS = [(value, ("layout", ("KVLayout.COMBINED", "KVLayout.SEPARATE"), repr(value))) for value in ("combined", "SEPARATE", None, 0)]

BAD = [
    *[(KVLayerConfig, dataclasses.asdict(LAYER), "num_kv_heads", *bad) for bad in _integers("KVLayerConfig.num_kv_heads", INT32_MAX)],
    *[(KVLayerConfig, dataclasses.asdict(LAYER), "head_dim", *bad) for bad in _integers("KVLayerConfig.head_dim", INT32_MAX)],
    *[(KVLayerConfig, dataclasses.asdict(LAYER), "k_scale", *bad) for bad in _scales("KVLayerConfig.k_scale")],
    *[(KVLayerConfig, dataclasses.asdict(LAYER), "v_scale", *bad) for bad in _scales("KVLayerConfig.v_scale")],
    *[(KVCacheConfig, KV, "max_batch_size", *bad) for bad in _integers("KVCacheConfig.max_batch_size", MAX_SLOTS)],
    *[(KVCacheConfig, KV, "max_sequence_length", *bad) for bad in _integers("KVCacheConfig.max_sequence_length", INT32_MAX)],
    *[(KVCacheConfig, KV, "dtype", value, (f"KVCacheConfig.{parts[0]}", *parts[1:])) for value, parts in DTYPES],
    *[(KVCacheConfig, KV, "layout", value, (f"KVCacheConfig.{parts[0]}", *parts[1:])) for value, parts in LAYOUTS],
    (KVCacheConfig, KV, "layers", [], ("KVCacheConfig.layers", "at least one layer", "none")),
    (KVCacheConfig, KV, "layers", LAYER, ("KVCacheConfig.layers", "sequence of KVLayerConfig", "KVLayerConfig")),
    (KVCacheConfig, KV, "layers", "ab", ("KVCacheConfig.layers", "sequence of KVLayerConfig", "str")),
    (KVCacheConfig, KV, "layers", [LAYER] * (MAX_LAYERS + 1), ("KVCacheConfig.layers", "at most 10000 layers", "more")),
    (KVCacheConfig, KV, "layers", itertools.repeat(LAYER), ("KVCacheConfig.layers", "at most 10000 layers", "more")),
    (KVCacheConfig, KV, "layers", 3, ("KVCacheConfig.layers", "sequence of KVLayerConfig", 3)),
    (KVCacheConfig, KV, "layers", [LAYER, (2, 16)], ("KVCacheConfig.layers[1]", "KVLayerConfig", "tuple")),
    *[(CacheConfig, LINEAR, "num_attention_layers", *bad) for bad in _integers("CacheConfig.num_attention_layers", MAX_LAYERS)],
    *[(CacheConfig, LINEAR, "max_batch_size", *bad) for bad in _integers("CacheConfig.max_batch_size", MAX_SLOTS)],
    *[(CacheConfig, LINEAR, "max_sequence_length", *bad) for bad in _integers("CacheConfig.max_sequence_length", INT32_MAX)],
    *[(CacheConfig, LINEAR, "num_kv_heads", *bad) for bad in _integers("KVLayerConfig.num_kv_heads", INT32_MAX)],
    *[(CacheConfig, LINEAR, "head_dim", *bad) for bad in _integers("KVLayerConfig.head_dim", INT32_MAX)],
    *[(CacheConfig, LINEAR, "k_scale", *bad) for bad in _scales("KVLayerConfig.k_scale")],
    *[(CacheConfig, LINEAR, "v_scale", *bad) for bad in _scales("KVLayerConfig.v_scale")],
    *[(CacheConfig, LINEAR, "dtype", value, (f"CacheConfig.{parts[0]}", *parts[1:])) for value, parts in DTYPES],
    *[(CacheConfig, LINEAR, "layout", value, (f"CacheConfig.{parts[0]}", *parts[1:])) for value, parts in LAYOUTS],
    (CacheConfig, LINEAR, "num_mamba_layers", -1, ("CacheConfig.num_mamba_layers", "0 to 10000", -1)),
    (CacheConfig, LINEAR, "num_mamba_layers", 1.0, ("CacheConfig.num_mamba_layers", "integer", "1.0")),
    (CacheConfig, LINEAR, "num_mamba_layers", 2, ("MambaCacheConfig.conv_dim", "1 to 2147483647", 0)),
    (
        CacheConfig,
        {**LINEAR, **LINEAR_STATES},
        "conv_kernel",
        0,
        ("MambaCacheConfig.conv_kernel", "1 to 2147483647", 0),
    ),
]


@pytest.mark.parametrize(
    ("kind", "fields", "name", "value", "parts"), BAD, ids=[f"{b[0].__name__}.{b[2]}={short_repr(b[3]):.12}" for b in BAD]
)
def test_a_field_out_of_range(kind, fields, name, value, parts):
    with raises(ConfigError, *parts):
        kind(**{**fields, name: value})


@pytest.mark.parametrize(
    ("dtype", "head_dim", "row"),
    [("float16", 12, 24), ("bfloat16", 4, 8), ("float32", 2, 8), ("float32", 7, 28), ("int8", 8, 8), ("float8_e4m3fn", 24, 24)],
)
def test_a_row_is_a_multiple_of_16_bytes(dtype, head_dim, row):
    text = f"layer {{}} has rows of {row} bytes (head_dim {head_dim} in {dtype}); expected a multiple of 16 bytes."
    with pytest.raises(ConfigError) as caught:
        KVCacheConfig(**{**KV, "layers": [LAYER, KVLayerConfig(num_kv_heads=1, head_dim=head_dim)]}, dtype=dtype)
    assert str(caught.value) == "KVCacheConfig: " + text.format(1)
    with pytest.raises(ConfigError) as caught:
        CacheConfig(**{**LINEAR, "head_dim": head_dim}, dtype=dtype)
    assert str(caught.value) == "CacheConfig: " + text.format(0)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 8), ("bfloat16", 24), ("float32", 4), ("float32", 12), ("int8", 16), ("float8_e4m3fn", 48)]
)
def test_the_smallest_rows_are_served(dtype, head_dim):
    assert KVCacheConfig(**{**KV, "layers": [KVLayerConfig(num_kv_heads=1, head_dim=head_dim)]}, dtype=dtype).num_layers == 1


STORED = KVCacheConfig(**KV).to_dict()

BAD_STORED = [
    ({key: value for key, value in STORED.items() if key != "layers"}, "a missing or unknown field ('layers')"),
    ({key: value for key, value in STORED.items() if key != "max_batch_size"}, "a missing or unknown field"),
    ({**STORED, "sliding_window": 4}, "sliding_window"),
    ({**STORED, "layers": [{"num_kv_heads": 2}]}, "head_dim"),
    ({**STORED, "layers": [{**STORED["layers"][0], "rank": 4}]}, "rank"),
    ({**STORED, "layers": [3]}, "a missing or unknown field"),
    ({**STORED, "layers": 3}, "a missing or unknown field"),
    ({**STORED, "layout": "paged"}, "'paged' is not a valid KVLayout"),
    ({**STORED, "max_batch_size": 0}, "KVCacheConfig.max_batch_size: expected an integer from 1 to 65535, got 0."),
    ([], "a missing or unknown field"),
    (None, "a missing or unknown field"),
    ([1, 2], "KVCacheConfig"),
    (["ab"], "KVCacheConfig"),
]


@pytest.mark.parametrize(("data", "text"), BAD_STORED, ids=range(len(BAD_STORED)))
def test_a_stored_config_that_is_damaged(data, text):
    with pytest.raises(ConfigError) as caught:
        KVCacheConfig.from_dict(data)
    assert text in str(caught.value)
    assert str(caught.value).startswith("KVCacheConfig")
