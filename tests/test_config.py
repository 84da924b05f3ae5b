import dataclasses
import json

import pytest

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
KV = {"layers": [LAYER], "max_batch_size": 3, "max_sequence_length": 7}
LINEAR = {"num_attention_layers": 4, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 16}
MAMBA = {"num_layers": 2, "max_batch_size": 3, "num_heads": 2, "head_dim": 3, "state_size": 5, "conv_dim": 7, "conv_kernel": 4}
LINEAR_STATES = {"num_mamba_layers": 2, "mamba_num_heads": 2, "mamba_head_dim": 3, "ssm_state_size": 5, "conv_dim": 7, "conv_kernel": 4}
TYPES = (LayerType.MAMBA, LayerType.ATTENTION, LayerType.MAMBA)
HYBRID = {"layer_types": TYPES, "kv": KVCacheConfig(**KV), "mamba": MambaCacheConfig(**MAMBA)}
GOOD = {
    KVLayerConfig: dataclasses.asdict(LAYER),
    KVCacheConfig: KV,
    CacheConfig: {**LINEAR, **LINEAR_STATES},
    MambaCacheConfig: MAMBA,
    HybridCacheConfig: HYBRID,
}


MANAGERS = {
    KVCacheConfig: KVCacheManager,
    CacheConfig: LinearKVCache,
    MambaCacheConfig: MambaCacheManager,
    HybridCacheConfig: HybridCacheManager,
}
TWO_LAYERS = {**KV, "layers": [LAYER, KVLayerConfig(num_kv_heads=1, head_dim=80)]}
CONFIGS = [
    *(KVCacheConfig(**TWO_LAYERS, dtype=dtype, layout=layout) for dtype in ("float16", "int8") for layout in KVLayout),
    CacheConfig(**LINEAR, **LINEAR_STATES),
    MambaCacheConfig(**MAMBA, recurrent_dtype="bfloat16", conv_dtype="float32", ping_pong=True),
    HybridCacheConfig(**HYBRID),
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


def test_a_hybrid_config_of_layers():
    config = HybridCacheConfig(**HYBRID)
    assert (config.num_layers, config.max_batch_size, config.max_sequence_length, config.indices_in_kind) == (3, 3, 7, (0, 0, 1))
    mamba = {**MAMBA, "recurrent_dtype": "float32", "conv_dtype": "float16", "ping_pong": False}
    kv = {**KV, "layers": [dataclasses.asdict(LAYER)], "dtype": "float16", "layout": "separate"}
    assert config.to_dict() == {"layer_types": ["mamba", "attention", "mamba"], "kv": kv, "mamba": mamba}


BAD = []


def refuse(kind, names, *wrong, owner=None):
    for name in names.split():
        BAD.extend((kind, name, value, f"{(owner or kind).__name__}.{name}: expected {text}") for value, text in wrong)


ABOVE_0 = [(2.0, "an integer, got 2.0."), (0, "at least 1, got 0.")]
INT32 = [(value, f"an integer from 1 to 2147483647, got {value}.") for value in (0, 2**31)]
SCALE = [(value, f"a finite float32 above 0, got {value!r}.") for value in (0, float("nan"), 1e300, "1.0")]
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
refuse(MambaCacheConfig, "max_batch_size", *INT32)
refuse(MambaCacheConfig, "num_layers num_heads head_dim state_size conv_dim conv_kernel", *ABOVE_0)
refuse(MambaCacheConfig, "recurrent_dtype conv_dtype", ("int8", "one of float16, bfloat16, float32, got 'int8'."))
MORE, FOUR = [*TYPES, LayerType.ATTENTION], dataclasses.replace(HYBRID["mamba"], max_batch_size=4)
BAD += [
    (HybridCacheConfig, "layer_types", MORE, "HybridCacheConfig.kv: layer_types has 2 attention layers, kv describes 1."),
    (HybridCacheConfig, "mamba", FOUR, "HybridCacheConfig: max_batch_size differs: kv has 3, mamba has 4."),
]


@pytest.mark.parametrize(("kind", "name", "value", "text"), BAD)
def test_a_field_out_of_range(kind, name, value, text):
    with pytest.raises(ConfigError) as caught:
        kind(**{**GOOD[kind], name: value})
    assert str(caught.value) == text


def test_a_row_is_a_multiple_of_16_bytes():
    text = r"^KVCacheConfig: layer 1 has rows of 24 bytes \(head_dim 12 in float16\); expected a multiple of 16 bytes\.$"
    with pytest.raises(ConfigError, match=text):
        KVCacheConfig(**{**KV, "layers": [LAYER, KVLayerConfig(num_kv_heads=1, head_dim=12)]})
