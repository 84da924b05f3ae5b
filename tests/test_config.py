from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import (
    CacheConfig,
    HostMemory,
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LayerType,
    LinearKVCache,
    MambaCacheConfig,
    MambaCacheManager,
    estimate_memory,
)
from trt_kvcache.errors import ConfigError

LAYER = KVLayerConfig(num_kv_heads=2, head_dim=16)
KV: dict[str, Any] = {"layers": [LAYER], "max_batch_size": 3, "max_sequence_length": 7}
LINEAR = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}
MAMBA = {"num_layers": 2, "max_batch_size": 3, "num_heads": 2, "head_dim": 3, "state_size": 5, "conv_dim": 7, "conv_kernel": 4}
#: The same states in a CacheConfig.
LINEAR_STATES = {"num_mamba_layers": 2, "mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 5, "conv_dim": 7, "conv_kernel": 4}
TYPES = (LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA)
HYBRID: dict[str, Any] = {"layer_types": TYPES, "kv": KVCacheConfig(**KV), "mamba": MambaCacheConfig(**MAMBA)}
#: Fields of each configuration that are good.
GOOD: dict[Any, dict[str, Any]] = {
    KVLayerConfig: dataclasses.asdict(LAYER),
    KVCacheConfig: KV,
    CacheConfig: {**LINEAR, **LINEAR_STATES},
    MambaCacheConfig: MAMBA,
    HybridCacheConfig: HYBRID,
}
INT32_MAX = 2147483647


def test_defaults():
    kv, linear, mamba = KVCacheConfig(**KV), CacheConfig(**LINEAR), MambaCacheConfig(**MAMBA)
    assert (kv.dtype, kv.layout, LAYER.k_scale, LAYER.v_scale) == ("float16", KVLayout.SEPARATE, 1.0, 1.0)
    assert (linear.dtype, linear.layout, linear.num_mamba_layers, linear.mamba) == ("float16", KVLayout.SEPARATE, 0, None)
    assert (mamba.recurrent_dtype, mamba.conv_dtype, mamba.ping_pong) == ("float32", "float16", False)
    assert CacheConfig(**LINEAR, **LINEAR_STATES).mamba == mamba
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    assert CacheConfig(**LINEAR, **scales).kv == KVCacheConfig(**{**KV, "layers": [dataclasses.replace(LAYER, **scales)] * 4})


def test_values_are_kept_plain_whatever_came():
    layers = [KVLayerConfig(num_kv_heads=np.int64(2), head_dim=np.int32(16), k_scale=np.float32(0.5), v_scale=2)]
    kv = KVCacheConfig(layers=layers, max_batch_size=np.int8(3), max_sequence_length=np.uint16(7))
    values = (*dataclasses.astuple(layers[0]), kv.max_batch_size, kv.max_sequence_length)
    assert values == (2, 16, 0.5, 2.0, 3, 7)
    assert [type(value) for value in values] == [int, int, float, float, int, int]
    layers.append(LAYER)
    assert (type(kv.layers), kv.num_layers) == (tuple, 1)
    assert KVCacheConfig(**{**KV, "layers": iter([LAYER, LAYER])}).num_layers == 2


def test_is_uniform_looks_at_heads_and_head_dim():
    for field, uniform in (({}, True), ({"k_scale": 2.0}, True), ({"num_kv_heads": 1}, False), ({"head_dim": 32}, False)):
        assert KVCacheConfig(**{**KV, "layers": [LAYER, dataclasses.replace(LAYER, **field)]}).is_uniform is uniform


def test_scales_and_states_by_hand():
    assert KVCacheConfig(**{**KV, "layers": [LAYER] * 33}, dtype="int8").scales_nbytes == 512  # 33 * 2 * 4 = 264 -> 512
    # A layer: 3 * 30 * 4 = 360 -> 512 bytes of recurrent states, 3 * 28 * 2 = 168 -> 256 bytes of conv states.
    mamba = MambaCacheConfig(**MAMBA)
    assert (mamba.recurrent_storage.shape, mamba.recurrent_storage.layer_nbytes) == ((3, 2, 3, 5), 512)
    assert (mamba.conv_storage.shape, mamba.conv_storage.layer_nbytes) == ((3, 7, 4), 256)
    assert (mamba.num_buffers, mamba.slot_nbytes, mamba.nbytes) == (1, 2 * (120 + 56), 2 * (512 + 256))
    two = dataclasses.replace(mamba, ping_pong=True)
    assert (two.num_buffers, two.slot_nbytes, two.nbytes) == (2, 4 * (120 + 56), 4 * (512 + 256))
    other = dataclasses.replace(mamba, recurrent_dtype="float16", conv_dtype="float32")
    assert (other.recurrent_storage.layer_nbytes, other.conv_storage.layer_nbytes) == (256, 512)


MANAGERS: dict[Any, Any] = {
    KVCacheConfig: KVCacheManager,
    CacheConfig: LinearKVCache,
    MambaCacheConfig: MambaCacheManager,
    HybridCacheConfig: HybridCacheManager,
}
COMMON: dict[str, Any] = {
    "max_batch_size": st.integers(1, 5),
    "max_sequence_length": st.integers(1, 40),
    "dtype": st.sampled_from(["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]),
    "layout": st.sampled_from(KVLayout),
}
HEADS: dict[str, Any] = {"num_kv_heads": st.integers(1, 4), "head_dim": st.sampled_from([16, 32, 80])}
LAYERS = st.lists(st.builds(KVLayerConfig, **HEADS), min_size=1, max_size=4)
STATES = {
    **{name: st.integers(1, 5) for name in MAMBA},
    **{name: st.sampled_from(["float16", "bfloat16", "float32"]) for name in ("recurrent_dtype", "conv_dtype")},
    "ping_pong": st.booleans(),
}


@st.composite
def hybrids(draw: Any) -> HybridCacheConfig:
    kv, mamba = draw(st.builds(KVCacheConfig, layers=LAYERS, **COMMON)), draw(st.builds(MambaCacheConfig, **STATES))
    types = draw(st.permutations([LayerType.ATTENTION] * kv.num_layers + [LayerType.MAMBA] * mamba.num_layers))
    return HybridCacheConfig(layer_types=types, kv=kv, mamba=dataclasses.replace(mamba, max_batch_size=kv.max_batch_size))


CONFIGS = {
    KVCacheConfig: st.builds(KVCacheConfig, layers=LAYERS, **COMMON),
    CacheConfig: st.builds(partial(CacheConfig, **LINEAR_STATES), num_attention_layers=st.integers(1, 4), **COMMON, **HEADS),
    MambaCacheConfig: st.builds(MambaCacheConfig, **STATES),
    HybridCacheConfig: hybrids(),
}


@pytest.mark.parametrize("kind", CONFIGS)
@given(data=st.data())
def test_bytes_are_what_its_manager_allocates_and_its_stored_form_is_read_back(kind, data):
    config = data.draw(CONFIGS[kind])
    kv = config if kind is KVCacheConfig else getattr(config, "kv", None)
    mamba = config if kind is MambaCacheConfig else getattr(config, "mamba", None)
    memory = HostMemory()
    with MANAGERS[kind](config, memory=memory) as cache:
        # Of the array that kernels read, five words for a K/V layer, three for a state.
        infos = (40 * kv.num_layers if kv else 0) + (24 * 2 * mamba.num_layers * mamba.num_buffers if mamba else 0)
        assert memory.live_nbytes == config.nbytes + cache.lengths.nbytes + infos
        assert cache.nbytes == config.nbytes == estimate_memory(config).nbytes == sum(part.nbytes for part in (kv, mamba) if part)
    assert memory.live_nbytes == 0
    if kind is not CacheConfig:
        assert kind.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_stored_forms():
    kv = KVCacheConfig(**{**KV, "layers": [dataclasses.replace(LAYER, k_scale=0.5)]}, dtype="int8", layout=KVLayout.COMBINED)
    layer = {"num_kv_heads": 2, "head_dim": 16, "k_scale": 0.5, "v_scale": 1.0}
    assert kv.to_dict() == {**KV, "layers": [layer], "dtype": "int8", "layout": "combined"}
    mamba = {**MAMBA, "recurrent_dtype": "float32", "conv_dtype": "float16", "ping_pong": False}
    assert MambaCacheConfig(**MAMBA).to_dict() == mamba
    types = ["mamba", "attention", "mamba"]
    assert HybridCacheConfig(**HYBRID).to_dict() == {"layer_types": types, "kv": HYBRID["kv"].to_dict(), "mamba": mamba}


def test_a_hybrid_config_of_layers():
    config = HybridCacheConfig(**HYBRID)
    assert (config.num_layers, config.max_batch_size, config.max_sequence_length) == (3, 3, 7)
    assert config.indices_in_kind == (0, 0, 1)
    assert HybridCacheConfig(**{**HYBRID, "layer_types": iter(TYPES)}) == config
    for part, layer_type, longest in (("mamba", LayerType.MAMBA, INT32_MAX), ("kv", LayerType.ATTENTION, 7)):
        alone = HybridCacheConfig(layer_types=[layer_type] * HYBRID[part].num_layers, **{part: HYBRID[part]})
        assert (alone.max_batch_size, alone.max_sequence_length, alone.nbytes) == (3, longest, HYBRID[part].nbytes)
        assert HybridCacheConfig.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone


BAD: list[tuple[Any, str, Any, str]] = []


def refuse(kind: Any, names: str, *wrong: tuple[Any, str], owner: Any = None) -> None:
    """Add rows of a class, fields, and ``(value, text)``, where the text starts with what the field is called."""
    for name in names.split():
        BAD.extend((kind, name, value, f"{(owner or kind).__name__}.{name}: expected {text}") for value, text in wrong)


NO_INTEGERS = [(value, f"an integer, got {value!r}.") for value in (2.0, True, "2", None)]
ABOVE_0 = [*NO_INTEGERS, *((value, f"at least 1, got {value}.") for value in (0, -1))]
INT32 = [*NO_INTEGERS, *((value, f"an integer from 1 to {INT32_MAX}, got {value}.") for value in (0, -1, INT32_MAX + 1))]
SCALE = [
    (value, f"a finite float32 above 0, got {value!r}.")
    for value in (0, -1.0, float("nan"), float("inf"), 1e300, 10**400, 1e-60, True, "1.0", None)
]
DTYPE = [(value, f"one of float16, bfloat16, float32, float8_e4m3fn, int8, got {value!r}.") for value in ("float64", "", None, np.float16)]
STATE_DTYPE = [(value, f"one of float16, bfloat16, float32, got {value!r}.") for value in ("int8", "", None)]
LAYOUT = [(value, f"KVLayout.COMBINED or KVLayout.SEPARATE, got {value!r}.") for value in ("combined", None)]
for kind in (KVLayerConfig, CacheConfig):
    refuse(kind, "num_kv_heads head_dim", *ABOVE_0, owner=KVLayerConfig)
    refuse(kind, "k_scale v_scale", *SCALE, owner=KVLayerConfig)
for kind in (KVCacheConfig, CacheConfig):
    refuse(kind, "max_batch_size max_sequence_length", *INT32)
    refuse(kind, "dtype", *DTYPE)
    refuse(kind, "layout", *LAYOUT)
SEQUENCE = "a sequence of KVLayerConfig, got"
refuse(KVCacheConfig, "layers", ([], "at least one layer, got none."), (LAYER, f"{SEQUENCE} KVLayerConfig."))
refuse(KVCacheConfig, "layers", ("ab", f"{SEQUENCE} str."), (3, f"{SEQUENCE} 3."))
BAD.append((KVCacheConfig, "layers", [LAYER, (2, 16)], "KVCacheConfig.layers[1]: expected a KVLayerConfig, got tuple."))
refuse(CacheConfig, "num_attention_layers", *ABOVE_0)
refuse(CacheConfig, "num_mamba_layers", (-1, "at least 0, got -1."), (1.0, "an integer, got 1.0."))
refuse(CacheConfig, "conv_kernel", (0, "at least 1, got 0."), owner=MambaCacheConfig)
BAD.append((CacheConfig, "mamba_num_heads", 0, "MambaCacheConfig.num_heads: expected at least 1, got 0."))
refuse(MambaCacheConfig, "max_batch_size", *INT32)
refuse(MambaCacheConfig, "num_layers num_heads head_dim state_size conv_dim conv_kernel", *ABOVE_0)
refuse(MambaCacheConfig, "recurrent_dtype conv_dtype", *STATE_DTYPE)
refuse(MambaCacheConfig, "ping_pong", (1, "True or False, got 1."))
SEQUENCE = "a sequence of LayerType, got"
refuse(HybridCacheConfig, "layer_types", ([], "at least one layer, got none."), ("MAM", f"{SEQUENCE} 'MAM'."), (3, f"{SEQUENCE} 3."))
refuse(HybridCacheConfig, "kv", (CacheConfig(**LINEAR), "a KVCacheConfig or None, got CacheConfig."))
refuse(HybridCacheConfig, "mamba", (HYBRID["kv"], "a MambaCacheConfig or None, got KVCacheConfig."))
MORE, FOUR = [*TYPES, LayerType.ATTENTION], dataclasses.replace(HYBRID["mamba"], max_batch_size=4)
BAD += [
    (HybridCacheConfig, name, value, f"HybridCacheConfig{text}")
    for name, value, text in (
        ("layer_types", [*TYPES[:2], "mamba"], ".layer_types[2]: expected a LayerType, got 'mamba'."),
        ("layer_types", MORE, ".kv: layer_types has 2 attention layers, kv describes 1."),
        ("layer_types", TYPES[:2], ".mamba: layer_types has 1 mamba layers, mamba describes 2."),
        ("kv", None, ".kv: layer_types has 1 attention layers, kv describes 0."),
        ("mamba", None, ".mamba: layer_types has 2 mamba layers, mamba describes 0."),
        ("mamba", FOUR, ": max_batch_size differs: kv has 3, mamba has 4."),
    )
]


@pytest.mark.parametrize(("kind", "name", "value", "text"), BAD, ids=[f"{b[0].__name__}.{b[1]}={b[2]!r:.12}" for b in BAD])
def test_a_field_out_of_range(kind, name, value, text):
    with pytest.raises(ConfigError) as caught:
        kind(**{**GOOD[kind], name: value})
    assert str(caught.value) == text


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
    smallest = KVLayerConfig(num_kv_heads=1, head_dim=16 // (row // head_dim))
    assert KVCacheConfig(**{**KV, "layers": [smallest]}, dtype=dtype).layers == (smallest,)


STORED, STORED_HYBRID = KVCacheConfig(**KV).to_dict(), HybridCacheConfig(**HYBRID).to_dict()
STORED_MAMBA = STORED_HYBRID["mamba"]
UNKNOWN = "a missing or unknown field"


def without(stored: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in stored.items() if key != field}


BAD_STORED = [
    (KVCacheConfig, without(STORED, "layers"), f"{UNKNOWN} ('layers')"),
    (KVCacheConfig, {**STORED, "sliding_window": 4}, "sliding_window"),
    (KVCacheConfig, {**STORED, "layers": [{"num_kv_heads": 2}]}, "head_dim"),
    (KVCacheConfig, {**STORED, "layers": [3]}, UNKNOWN),
    (KVCacheConfig, {**STORED, "layout": "paged"}, "'paged' is not a valid KVLayout"),
    (KVCacheConfig, {**STORED, "max_batch_size": 0}, "KVCacheConfig.max_batch_size: expected an integer from 1 to 2147483647, got 0."),
    *[(KVCacheConfig, data, text) for data, text in (([], UNKNOWN), (None, UNKNOWN), ([1, 2], ""), (["ab"], ""))],
    (MambaCacheConfig, without(STORED_MAMBA, "conv_dim"), "conv_dim"),
    (HybridCacheConfig, {**STORED_HYBRID, "layer_types": ["mamba", "paged", "mamba"]}, "'paged' is not a valid LayerType"),
    (HybridCacheConfig, {**STORED_HYBRID, "kv": {}}, f"KVCacheConfig: the stored form has {UNKNOWN} ('layers')"),
    (HybridCacheConfig, {**STORED_HYBRID, "kv": None}, "HybridCacheConfig.kv: layer_types has 1 attention layers, kv describes 0."),
    (HybridCacheConfig, without(STORED_HYBRID, "mamba"), "field ('mamba')"),
]


@pytest.mark.parametrize(("kind", "data", "text"), BAD_STORED)
def test_a_stored_config_that_is_damaged(kind, data, text):
    with pytest.raises(ConfigError) as caught:
        kind.from_dict(data)
    assert text in str(caught.value)
    assert kind is HybridCacheConfig or str(caught.value).startswith(kind.__name__)
