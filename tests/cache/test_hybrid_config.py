"""``HybridCacheConfig``: layers of two kinds, their bytes, the stored form, and what does not fit together."""

import dataclasses
import itertools
import json
from random import Random

import pytest
from hypothesis import given, strategies as st

from tests.cache.scene import KV_CONFIGS
from tests.helpers.assertions import raises
from trt_kvcache import (
    CacheConfig,
    HostMemory,
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVLayerConfig,
    LayerType,
    MambaCacheConfig,
    estimate_memory,
)
from trt_kvcache.errors import ConfigError

KV = KVCacheConfig(layers=[KVLayerConfig(num_kv_heads=2, head_dim=16)], max_batch_size=3, max_sequence_length=7)
STATES = MambaCacheConfig(num_layers=2, max_batch_size=3, num_heads=2, head_dim=3, state_size=5, conv_dim=7, conv_kernel=4)
TYPES = (LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA)
FIELDS = {"layer_types": TYPES, "kv": KV, "mamba": STATES}
INT32_MAX = 2147483647
#: Bytes of the array that kernels read: five words for a K/V layer, three for a state.
KV_INFO, STATE_INFO = 40, 24


def test_frozen():
    config = HybridCacheConfig(**FIELDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kv = None


def test_keyword_only():
    with pytest.raises(TypeError):
        HybridCacheConfig(TYPES, KV, STATES)


def test_equal_by_value():
    config, twin = HybridCacheConfig(**FIELDS), HybridCacheConfig(**FIELDS)
    assert (twin, hash(twin)) == (config, hash(config))
    assert dataclasses.replace(config, kv=dataclasses.replace(KV, dtype="int8")) != config


def test_layer_types_are_kept_as_a_tuple_whatever_sequence_came():
    assert HybridCacheConfig(**{**FIELDS, "layer_types": iter(TYPES)}) == HybridCacheConfig(**FIELDS)


def test_sizes_are_those_of_its_parts():
    config = HybridCacheConfig(**FIELDS)
    assert (config.num_layers, config.max_batch_size, config.max_sequence_length) == (3, 3, 7)


def test_each_layer_has_an_index_among_those_of_its_kind():
    assert HybridCacheConfig(**FIELDS).indices_in_kind == (0, 0, 1)


def test_recurrent_layers_alone_have_no_limit_of_tokens():
    alone = HybridCacheConfig(layer_types=[LayerType.MAMBA] * 2, mamba=STATES)
    assert (alone.max_batch_size, alone.max_sequence_length, alone.nbytes) == (3, INT32_MAX, STATES.nbytes)


def test_recurrent_layers_alone_may_have_a_limit_of_tokens():
    alone = HybridCacheConfig(layer_types=[LayerType.MAMBA] * 2, mamba=STATES).with_max_sequence_length(5)
    assert (alone.max_sequence_length, alone.mamba.max_sequence_length, alone.nbytes) == (5, 5, STATES.nbytes)


def test_attention_layers_alone():
    alone = HybridCacheConfig(layer_types=[LayerType.ATTENTION], kv=KV)
    assert (alone.max_batch_size, alone.max_sequence_length, alone.nbytes) == (3, 7, KV.nbytes)


SIZES = ("num_layers", "max_batch_size", "num_heads", "head_dim", "state_size", "conv_dim", "conv_kernel")
MAMBA_PARTS = st.builds(MambaCacheConfig, **dict.fromkeys(SIZES, st.integers(1, 5)), ping_pong=st.booleans())


def hybrid_of(kv, mamba, seed):
    """A hybrid of these parts, its layers in any order."""
    types = [LayerType.ATTENTION] * kv.num_layers + [LayerType.MAMBA] * mamba.num_layers
    Random(seed).shuffle(types)
    return HybridCacheConfig(layer_types=types, kv=kv, mamba=dataclasses.replace(mamba, max_batch_size=kv.max_batch_size))


CONFIGS = st.builds(hybrid_of, KV_CONFIGS, MAMBA_PARTS, st.integers(0, 99))


@given(CONFIGS)
def test_bytes_are_what_a_manager_allocates(config):
    memory = HostMemory()
    with HybridCacheManager(config, memory=memory) as cache:
        infos = KV_INFO * config.kv.num_layers + STATE_INFO * 2 * config.mamba.num_layers * config.mamba.num_buffers
        assert memory.live_nbytes == config.nbytes + cache.lengths.nbytes + infos
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes == config.kv.nbytes + config.mamba.nbytes
    assert memory.live_nbytes == 0


@given(CONFIGS)
def test_a_stored_config_is_read_back(config):
    assert HybridCacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "config",
    [
        HybridCacheConfig(layer_types=[LayerType.ATTENTION], kv=KV),
        HybridCacheConfig(layer_types=[LayerType.MAMBA] * 2, mamba=STATES),
    ],
    ids=["attention", "mamba"],
)
def test_a_stored_config_of_one_kind_of_layer_is_read_back(config):
    assert HybridCacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_stored_form():
    stored = {"layer_types": ["mamba", "attention", "mamba"], "kv": KV.to_dict(), "mamba": STATES.to_dict()}
    assert HybridCacheConfig(**FIELDS).to_dict() == stored


LINEAR = CacheConfig(num_attention_layers=1, max_batch_size=3, max_sequence_length=7, num_kv_heads=2, head_dim=16)
BAD = [
    ("layer_types", [], ("HybridCacheConfig.layer_types", "at least one layer", "none")),
    ("layer_types", "MAM", ("HybridCacheConfig.layer_types", "sequence of LayerType", "'MAM'")),
    ("layer_types", itertools.repeat(LayerType.MAMBA), ("HybridCacheConfig.layer_types", "at most 20000 layers", "more")),
    ("layer_types", 3, ("HybridCacheConfig.layer_types", "sequence of LayerType", 3)),
    ("layer_types", [*TYPES[:2], "mamba"], ("HybridCacheConfig.layer_types[2]", "LayerType", "'mamba'")),
    (
        "layer_types",
        [*TYPES, LayerType.ATTENTION],
        ("HybridCacheConfig.kv: layer_types has 2 attention layers, kv describes 1",),
    ),
    ("layer_types", TYPES[:2], ("HybridCacheConfig.mamba: layer_types has 1 mamba layers, mamba describes 2",)),
    ("kv", None, ("HybridCacheConfig.kv: layer_types has 1 attention layers, kv describes 0",)),
    ("mamba", None, ("HybridCacheConfig.mamba: layer_types has 2 mamba layers, mamba describes 0",)),
    ("kv", LINEAR, ("HybridCacheConfig.kv", "KVCacheConfig or None", "CacheConfig")),
    ("mamba", KV, ("HybridCacheConfig.mamba", "MambaCacheConfig or None", "KVCacheConfig")),
    (
        "mamba",
        dataclasses.replace(STATES, max_batch_size=4),
        ("HybridCacheConfig: max_batch_size differs: kv has 3, mamba has 4",),
    ),
    (
        "mamba",
        dataclasses.replace(STATES, max_sequence_length=6),
        ("HybridCacheConfig.mamba", "max_sequence_length of at least 7, as kv has", 6),
    ),
]


@pytest.mark.parametrize(("name", "value", "parts"), BAD, ids=range(len(BAD)))
def test_parts_that_do_not_fit_together(name, value, parts):
    with raises(ConfigError, *parts):
        HybridCacheConfig(**{**FIELDS, name: value})


STORED = HybridCacheConfig(**FIELDS).to_dict()
BAD_STORED = [
    ({**STORED, "layer_types": ["mamba", "paged", "mamba"]}, "'paged' is not a valid LayerType"),
    ({**STORED, "layer_types": None}, "a missing or unknown field"),
    ({**STORED, "kv": {}}, "KVCacheConfig: the stored form has a missing or unknown field ('layers')"),
    ({**STORED, "kv": None}, "HybridCacheConfig.kv: layer_types has 1 attention layers, kv describes 0."),
    ({key: value for key, value in STORED.items() if key != "mamba"}, "field ('mamba')"),
]


@pytest.mark.parametrize(("data", "text"), BAD_STORED, ids=range(len(BAD_STORED)))
def test_a_stored_config_that_is_damaged(data, text):
    with pytest.raises(ConfigError) as caught:
        HybridCacheConfig.from_dict(data)
    assert text in str(caught.value)
