from __future__ import annotations

import warnings
from typing import Any

import pytest

from trt_kvcache.checkpoint import ModelConfig, RopeConfig
from trt_kvcache.errors import ConfigError


def new_spelling(**changes: Any) -> dict[str, Any]:
    """What transformers 5 writes for a small Llama."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 3,
        "eos_token_id": 4,
        **changes,
    }


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


def test_every_field_is_read() -> None:
    assert ModelConfig.from_dict(new_spelling()) == ModelConfig(
        family="llama",
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_attention_heads=6,
        num_kv_heads=3,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(kind="default", theta=500000.0),
        max_position_embeddings=128,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype="bfloat16",
        bos_token_id=3,
        eos_token_ids=(4,),
    )


def test_old_spelling_means_the_same() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    old = without(new_spelling(), "rope_parameters", "dtype")
    old |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new_spelling(rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "qkv", "o", "mlp", "qk_norm"),
    [
        ({}, False, False, False, False),
        ({"attention_bias": True}, True, True, False, False),
        ({"mlp_bias": True}, False, False, True, False),
        ({"model_type": "qwen2", "architectures": None, "attention_bias": True, "mlp_bias": True}, True, False, False, False),
        ({"model_type": "qwen3", "architectures": None, "mlp_bias": True}, False, False, False, True),
        ({"model_type": "qwen3", "architectures": None, "attention_bias": True}, True, True, False, True),
    ],
)
def test_biases_and_norms_of_each_family(changes: dict[str, Any], qkv: bool, o: bool, mlp: bool, qk_norm: bool) -> None:
    config = ModelConfig.from_dict(new_spelling(**changes))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (qkv, o, mlp, qk_norm)


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim", "positions", "bos", "eos"),
    [("llama", 32, 2, 2048, 1, (2,)), ("qwen2", 32, 2, 32768, None, ()), ("qwen3", 32, 128, 32768, None, ())],
)
def test_absent_fields_are_those_of_transformers(
    family: str, kv_heads: int, head_dim: int, positions: int, bos: int | None, eos: tuple[int, ...]
) -> None:
    data = {
        "model_type": family,
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }
    config = ModelConfig.from_dict(data, default_dtype="float16")
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (kv_heads, head_dim, positions)
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.dtype) == (1e-6, False, "float16")
    assert config.rope == RopeConfig(kind="default", theta=10000.0)


def test_null_heads_follow_from_the_others() -> None:
    config = ModelConfig.from_dict(new_spelling(model_type="qwen3", architectures=None, num_key_value_heads=None, head_dim=None))
    assert (config.num_kv_heads, config.head_dim) == (6, 8)


def test_family_by_architecture_alone() -> None:
    assert ModelConfig.from_dict(without(new_spelling(architectures=["Qwen3ForCausalLM"]), "model_type")).family == "qwen3"


@pytest.mark.parametrize(("given", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_end_tokens_one_or_many(given: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(new_spelling(eos_token_id=given)).eos_token_ids == expected


QWEN2_WINDOW = {"model_type": "qwen2", "architectures": None, "sliding_window": 512, "use_sliding_window": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "architectures": None, "sliding_window": 4096},
        {"model_type": "qwen3", "architectures": None, "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "architectures": None, "sliding_window": None, "use_sliding_window": True},
        {**QWEN2_WINDOW, "max_window_layers": 2},
        {**QWEN2_WINDOW, "max_window_layers": 28},
        QWEN2_WINDOW,
        {**QWEN2_WINDOW, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 512, "use_sliding_window": False},
        {"sliding_window": 1 << 20},
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 1.0}},
    ],
)
def test_unsupported_features_that_are_off_are_ignored(changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig.from_dict(new_spelling(**changes))


def test_a_window_that_llama_ignores_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="sliding_window: Llama has no sliding window; the one of 64 tokens is ignored"):
        config = ModelConfig.from_dict(new_spelling(sliding_window=64))
    assert config == ModelConfig.from_dict(new_spelling())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, r"model_type: 'mistral' is not supported\. Supported: Llama, Qwen2 and Qwen3 .*llama3.*bfloat16"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, r"architectures: \['GPT2LMHeadModel'\] is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: expected LlamaForCausalLM for model_type 'llama'"),
        (
            {"model_type": "qwen3", "architectures": None, "use_sliding_window": True, "max_window_layers": 1},
            "sliding_window: a window of 4096 tokens is not supported",
        ),
        (
            {"model_type": "qwen2", "architectures": None, "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1},
            "sliding_window: a window of 512",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: a model with quantised weights is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map: a model with custom code \\(trust_remote_code\\) is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: a model with soft-capped logits is not supported"),
        ({"dtype": "float64"}, r"dtype: 'float64' is not supported\. Supported: .*float16, bfloat16, float32"),
        ({"torch_dtype": "float16"}, "dtype and torch_dtype: expected one value, got 'bfloat16' and 'float16'"),
        ({"head_dim": 15}, "head_dim: expected an even number .*, got 15"),
        ({"num_key_value_heads": 4}, "num_attention_heads: expected a multiple of num_key_value_heads=4, got 6"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size: expected a multiple of num_attention_heads=6 .*, got 50"),
        ({"vocab_size": None}, "vocab_size: expected a value, got none"),
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, got 0"),
        ({"hidden_size": "48"}, "hidden_size: expected a positive integer, got '48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, got True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number > 0, got nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, got 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of token ids, got '</s>'"),
        ({"bos_token_id": [1, 2]}, r"bos_token_id: expected one token id, got \[1, 2\]"),
    ],
)
def test_unsupported_and_damaged_fields_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(new_spelling(**changes))


def test_no_dtype_anywhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: None is not supported"):
        ModelConfig.from_dict(without(new_spelling(), "dtype"))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "eos_token_id": [4, 9]},
        {"model_type": "qwen2", "architectures": None, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None},
        {"model_type": "qwen3", "architectures": None, "attention_bias": True, "head_dim": 32},
        {"mlp_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 3.0}},
    ],
)
def test_to_dict_is_read_back(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(new_spelling(**changes))
    assert ModelConfig.from_dict(config.to_dict()) == config
