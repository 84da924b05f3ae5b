import pytest

from trt_kvcache.checkpoint import ModelConfig, RopeConfig
from trt_kvcache.errors import ConfigError

SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
LLAMA = {
    **SIZES,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 3,
    "eos_token_id": 4,
}
QWEN2, QWEN3 = ({"model_type": family, "architectures": None} for family in ("qwen2", "qwen3"))


def read(**changes):
    return ModelConfig.from_dict({name: value for name, value in (LLAMA | changes).items() if value is not ...})


def test_every_field_is_read():
    flags = dict.fromkeys(("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"), False)
    heads = {"num_layers": 2, "num_attention_heads": 6, "num_kv_heads": 3}
    rope = RopeConfig(kind="default", theta=500000.0)
    assert read() == ModelConfig(**SIZES, **heads, **flags, family="llama", rope=rope, dtype="bfloat16", bos_token_id=3, eos_token_ids=(4,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "---- "),
        ({"attention_bias": True}, "qo-- "),
        ({"mlp_bias": True}, "--m- "),
        ({**QWEN3, "mlp_bias": True}, "---n "),
        ({**QWEN2, "attention_bias": True, "mlp_bias": True}, "q--- "),
        ({"tie_word_embeddings": True}, "----t"),
    ],
)
def test_biases_and_norms_of_each_family(changes, expected):
    config = read(**changes)
    flags = (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings)
    assert flags == tuple(letter not in "- " for letter in expected)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", (32, 2, 2048, 1, (2,))), ("qwen2", (32, 2, 32768, None, ())), ("qwen3", (32, 128, 32768, None, ()))]
)
def test_absent_fields_are_those_of_transformers(family, expected):
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = ModelConfig.from_dict({"model_type": family, **sizes}, default_dtype="float16")
    tokens = (config.bos_token_id, config.eos_token_ids)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings, *tokens) == expected
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.dtype) == (1e-6, False, "float16")
    assert config.rope == RopeConfig(kind="default", theta=10000.0)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({**QWEN3, "num_key_value_heads": None, "head_dim": None}, {"num_kv_heads": 6, "head_dim": 8}),
        ({"model_type": ..., "architectures": ["Qwen3ForCausalLM"]}, {"family": "qwen3"}),
        ({**QWEN2, "sliding_window": 4096}, {}),
        ({"eos_token_id": [5, 7]}, {"eos_token_ids": (5, 7)}),
    ],
)
def test_other_spellings(changes, expected):
    config = read(**changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            r"model_type: 'gpt2' is not supported\. Supported: Llama, Qwen2 and Qwen3 .*llama3.*float16, bfloat16, float32",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: expected LlamaForCausalLM for model_type 'llama'"),
        ({"sliding_window": 512}, "sliding_window: a window of 512 tokens"),
        ({"torch_dtype": "float16"}, "dtype and torch_dtype: expected one value, got 'bfloat16' and 'float16'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: a model with quantised weights"),
    ],
)
def test_anything_else_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)
