import dataclasses
import json

import pytest

from tests.helpers.cache_cases import ATTENTION, LAYER_TYPES, MAMBA, B, S, hybrid_config, kv_config, linear_config, mamba_config
from trt_kvcache import (
    CacheConfig,
    HostMemory,
    HybridCacheConfig,
    HybridCacheManager,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
    LinearKVCache,
    MambaCacheConfig,
    MambaCacheManager,
    estimate_memory,
)
from trt_kvcache.errors import ConfigError

LAYER = KVLayerConfig(num_kv_heads=2, head_dim=16)
GOOD = {type(config): config for config in (LAYER, kv_config(), linear_config(), mamba_config(), hybrid_config())}
MANAGERS = dict(zip([*GOOD][1:], (KVCacheManager, LinearKVCache, MambaCacheManager, HybridCacheManager), strict=True))
CONFIGS = [
    *(kv_config(dtype=dtype, layout=layout) for dtype in ("float16", "int8") for layout in KVLayout),
    linear_config(),
    linear_config(num_mamba_layers=0, layout=KVLayout.COMBINED, dtype="float8_e4m3fn"),
    mamba_config(recurrent_dtype="bfloat16", conv_dtype="float32", ping_pong=True),
    hybrid_config(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_bytes_are_what_its_manager_allocates_and_its_stored_form_is_read_back(config):
    kind = type(config)
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


def test_defaults_stored_forms_and_a_hybrid_of_one_kind():
    layer = {"num_kv_heads": 2, "head_dim": 16, "k_scale": 1.0, "v_scale": 1.0}
    assert (dataclasses.asdict(LAYER), linear_config().mamba) == (layer, mamba_config())
    kv, mamba = kv_config([(2, 16)]).to_dict(), mamba_config().to_dict()
    assert kv == {"layers": [layer], "max_batch_size": B, "max_sequence_length": S, "dtype": "float16", "layout": "separate"}
    assert (mamba["recurrent_dtype"], mamba["conv_dtype"], mamba["ping_pong"]) == ("float32", "float16", False)
    config = hybrid_config()
    assert (config.num_layers, config.max_batch_size, config.max_sequence_length, config.indices_in_kind) == (5, B, S, (0, 0, 1, 1, 2))
    types = ["mamba", "attention", "attention", "mamba", "attention"]
    assert config.to_dict() == {"layer_types": types, "kv": kv_config().to_dict(), "mamba": mamba}
    for part, layers, longest in ((mamba_config(), [MAMBA] * 2, 2**31 - 1), (kv_config(), [ATTENTION] * 3, S)):
        alone = hybrid_config(layers)
        assert (alone.max_batch_size, alone.max_sequence_length, alone.nbytes) == (B, longest, part.nbytes)


BAD = []


def refuse(kind, names, *wrong, owner=None):
    for name in names.split():
        BAD.extend((kind, name, value, f"{(owner or kind).__name__}.{name}: expected {text}") for value, text in wrong)


NO_INTEGERS = [(value, f"an integer, got {value!r}.") for value in (2.0, True)]
ABOVE_0 = [*NO_INTEGERS, (0, "at least 1, got 0.")]
INT32 = [*NO_INTEGERS, *((value, f"an integer from 1 to 2147483647, got {value}.") for value in (0, 2**31))]
SCALE = [(value, f"a finite float32 above 0, got {value!r}.") for value in (0, float("nan"), 1e300, 1e-60, True, "1.0")]
DTYPE = [("float64", "one of float16, bfloat16, float32, float8_e4m3fn, int8, got 'float64'.")]
LAYOUT = [("combined", "KVLayout.COMBINED or KVLayout.SEPARATE, got 'combined'.")]
for kind in (KVLayerConfig, CacheConfig):
    refuse(kind, "num_kv_heads head_dim", *ABOVE_0, owner=KVLayerConfig)
    refuse(kind, "k_scale v_scale", *SCALE, owner=KVLayerConfig)
for kind in (KVCacheConfig, CacheConfig):
    refuse(kind, "max_batch_size max_sequence_length", *INT32)
    refuse(kind, "dtype", *DTYPE)
    refuse(kind, "layout", *LAYOUT)
refuse(KVCacheConfig, "layers", ([], "at least one layer, got none."), (LAYER, "a sequence of KVLayerConfig, got KVLayerConfig."))
refuse(CacheConfig, "num_attention_layers", *ABOVE_0)
refuse(CacheConfig, "num_mamba_layers", (-1, "at least 0, got -1."))
refuse(MambaCacheConfig, "max_batch_size", *INT32)
refuse(MambaCacheConfig, "num_layers num_heads head_dim state_size conv_dim conv_kernel", *ABOVE_0)
refuse(MambaCacheConfig, "recurrent_dtype conv_dtype", ("int8", "one of float16, bfloat16, float32, got 'int8'."))
refuse(MambaCacheConfig, "ping_pong", (1, "True or False, got 1."))
refuse(HybridCacheConfig, "layer_types", ([], "at least one layer, got none."), ("MAM", "a sequence of LayerType, got 'MAM'."))
HYBRID = "HybridCacheConfig"
BAD += [
    (KVCacheConfig, "layers", [LAYER, (2, 16)], "KVCacheConfig.layers[1]: expected a KVLayerConfig, got tuple."),
    (HybridCacheConfig, "layer_types", [*LAYER_TYPES[:2], "x"], f"{HYBRID}.layer_types[2]: expected a LayerType, got 'x'."),
    (HybridCacheConfig, "layer_types", [*LAYER_TYPES, ATTENTION], f"{HYBRID}.kv: layer_types has 4 attention layers, kv describes 3."),
    (HybridCacheConfig, "kv", None, f"{HYBRID}.kv: layer_types has 3 attention layers, kv describes 0."),
    (HybridCacheConfig, "mamba", mamba_config(max_batch_size=4), f"{HYBRID}: max_batch_size differs: kv has 5, mamba has 4."),
]


@pytest.mark.parametrize(("kind", "name", "value", "text"), BAD)
def test_a_field_out_of_range(kind, name, value, text):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(GOOD[kind], **{name: value})
    assert str(caught.value) == text


@pytest.mark.parametrize(("dtype", "head_dim", "row"), [("float16", 12, 24), ("float32", 7, 28), ("float8_e4m3fn", 24, 24)])
def test_a_row_is_a_multiple_of_16_bytes(dtype, head_dim, row):
    with pytest.raises(ConfigError) as caught:
        kv_config([(2, 16), (1, head_dim)], dtype=dtype)
    text = f"KVCacheConfig: layer 1 has rows of {row} bytes (head_dim {head_dim} in {dtype}); expected a multiple of 16 bytes."
    assert str(caught.value) == text
