from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trt_kvcache.errors import ConfigError
from trt_kvcache.model import (
    AttentionConfig,
    LayerConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    NormConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QkNormConfig,
    RopeConfig,
)


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
    norm = NormConfig(epsilon=1e-5)
    mixer = AttentionConfig(num_heads=6, num_kv_heads=3, head_dim=16, rope=RopeConfig(kind="default", theta=500000.0))
    layer = LayerConfig(mixer=mixer, mlp=MlpConfig(intermediate_size=80), input_norm=norm, mlp_norm=norm)
    assert ModelConfig.from_dict(new_spelling()) == ModelConfig(
        family="llama",
        vocab_size=61,
        hidden_size=48,
        layers=(layer, layer),
        final_norm=norm,
        max_position_embeddings=128,
        tie_word_embeddings=False,
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
    mixer = config.layers[0].mixer
    assert (mixer.qkv_bias, mixer.o_bias, config.layers[0].mlp.bias, mixer.qk_norm is not None) == (qkv, o, mlp, qk_norm)
    assert set(config.layers) == {config.layers[0]}


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
    mixer = config.layers[0].mixer
    assert (mixer.num_kv_heads, mixer.head_dim, config.max_position_embeddings) == (kv_heads, head_dim, positions)
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)
    assert (config.final_norm.epsilon, config.tie_word_embeddings, config.dtype) == (1e-6, False, "float16")
    assert mixer.rope == RopeConfig(kind="default", theta=10000.0)


def test_null_heads_follow_from_the_others() -> None:
    config = ModelConfig.from_dict(new_spelling(model_type="qwen3", architectures=None, num_key_value_heads=None, head_dim=None))
    assert (config.layers[0].mixer.num_kv_heads, config.layers[0].mixer.head_dim) == (6, 8)


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
        ({"model_type": "gpt2"}, r"model_type: 'gpt2' is not supported\. docs/models\.md lists"),
        (
            {"model_type": "gemma"},
            r"model_type: 'gemma' is not supported\. Supported and of a similar name: .*gemma2.*\. docs/models\.md lists",
        ),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, r"architectures: \['GPT2LMHeadModel'\] is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: expected LlamaForCausalLM for model_type 'llama'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: sliding_attention is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"auto_map": {"AutoModel": "x.Y"}}, r"auto_map: .* needs code of its own \(trust_remote_code\), which is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: .* has final logit softcapping, which is not supported"),
        ({"dtype": "float64"}, r"dtype: 'float64' is not supported\. Supported: .*float16, bfloat16, float32"),
        ({"torch_dtype": "float16"}, "dtype and torch_dtype: expected one value, got 'bfloat16' and 'float16'"),
        ({"head_dim": 15}, "head_dim: expected an even number .*, got 15"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 2 as num_hidden_layers says, got 1"),
        ({"num_key_value_heads": 4}, "num_attention_heads: expected a multiple of num_key_value_heads=4, got 6"),
        ({"head_dim": None, "hidden_size": 50}, "hidden_size: expected a multiple of num_attention_heads=6 .*, got 50"),
        ({"vocab_size": None}, "vocab_size: expected a value, got none"),
        ({"hidden_size": 0}, "hidden_size: expected a positive integer, got 0"),
        ({"hidden_size": "48"}, "hidden_size: expected a positive integer, got '48'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, got True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number > 0, got nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, got 'no'"),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of token ids, got '</s>'"),
        ({"hidden_size": dict.fromkeys("abcdefghij")}, "hidden_size: expected a positive integer, got an object with 10 fields"),
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
    ("changes", "windows"),
    [
        ({"max_window_layers": 1}, [None, 512]),
        ({"max_window_layers": 0}, [512, 512]),
        ({"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 9}, [512, None]),
    ],
)
def test_windows_of_qwen_that_are_switched_on(changes: dict[str, Any], windows: list[int | None]) -> None:
    config = ModelConfig.from_dict(new_spelling(**{**QWEN2_WINDOW, **changes}))
    assert [layer.mixer.window for layer in config.layers] == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": {"depth": 2}}, "vision_config: .* is a vision model, which is not supported"),
        ({"model_type": "qwen2_moe", "num_experts": 8}, r"num_experts: .* \(model_type qwen2_moe\) has a mixture of experts \(MoE\)"),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512}, r"kv_lora_rank: .* has multi-head latent attention \(MLA\), which is not"),
        ({"model_type": "mllama", "cross_attention_layers": [3]}, "cross_attention_layers: .* has cross attention, which is not supported"),
        ({"model_type": "llava", "text_config": {}, "vision_config": {"x": 1}}, "vision_config: .* is a vision model"),
    ],
)
def test_a_feature_that_no_family_has_is_named_before_the_family(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(new_spelling(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "eos_token_id": [4, 9]},
        {"model_type": "qwen2", "architectures": None, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None},
        {"model_type": "qwen3", "architectures": None, "attention_bias": True, "head_dim": 32},
        {"mlp_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 3.0}},
        {**QWEN2_WINDOW, "max_window_layers": 1},
    ],
)
def test_a_description_is_read_back(changes: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(new_spelling(**changes))
    assert ModelConfig.from_description(json.loads(json.dumps(config.to_description()))) == config


def test_a_description_has_equal_layers_once() -> None:
    description = ModelConfig.from_dict(new_spelling(**{**QWEN2_WINDOW, "max_window_layers": 2, "num_hidden_layers": 5})).to_description()
    assert description["layers"] == [0, 0, 1, 1, 1]
    assert [kind["mixer"].get("window") for kind in description["layer_kinds"]] == [None, 512]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gpt2"}, "model.family: expected one of llama, .*, got 'gpt2'"),
        ({"vocab_size": "61"}, "model.vocab_size: expected a int, got '61'"),
        ({"vocab_size": 0}, "ModelConfig.vocab_size: expected an integer from 1 to .*, got 0"),
        ({"layers": [0, 1]}, r"model.layers\[1\]: expected an integer from 0 to 0, got 1"),
        ({"layers": []}, "ModelConfig.layers: expected from 1 to 10000, got 0"),
        ({"layers": None}, "model: expected an object with layers and layer_kinds"),
        ({"colour": 3}, "model: expected only family, .*, got colour as well"),
        ({"final_norm": {}}, "model.final_norm.epsilon: expected a value, got none"),
        ({"layer_kinds": [{"mixer": 3}]}, r"model.layer_kinds\[0\].mlp: expected a value, got none"),
        ({"eos_token_ids": [True]}, r"model.eos_token_ids\[0\]: expected a int, got True"),
    ],
)
def test_a_damaged_description_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    description = ModelConfig.from_dict(new_spelling()).to_description()
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_description({**description, **change})


def test_the_multiplier_of_the_embedding_is_rounded_where_the_model_says_so() -> None:
    config = replace(ModelConfig.from_dict(new_spelling()), embedding_multiplier=3072**0.5)
    assert config.embedding_factor("bfloat16") == 3072**0.5
    assert replace(config, rounds_embedding_multiplier=True).embedding_factor("bfloat16") == 55.5


def test_how_keys_are_rotated_is_said_by_layer_where_layers_differ() -> None:
    config = ModelConfig.from_dict(new_spelling())
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    assert config.rope_at_length(64) == plain
    without_rope = replace(config.layers[0], mixer=replace(config.layers[0].mixer, rope=None))
    assert replace(config, layers=(config.layers[0], without_rope)).rope_at_length(64) == {"ropes": [plain, None], "layers": [0, 1]}


def sharing(**changes: Any) -> ModelConfig:
    """Return a model whose third and fifth layers read K and V of the second one."""
    config = ModelConfig.from_dict(new_spelling(num_hidden_layers=5))
    reader = replace(config.layers[2], mixer=replace(config.layers[2].attention, **{"kv_source_layer": 1, **changes}))
    return replace(config, layers=(*config.layers[:2], reader, config.layers[3], reader))


def test_layers_that_read_k_and_v_of_another_one_are_none_of_the_cache() -> None:
    config = sharing(num_heads=3, rope=None, window=4)
    assert (config.attention_indices, config.kv_indices, config.kv_of_attention) == ((0, 1, 2, 3, 4), (0, 1, 3), (0, 1, 1, 2, 1))
    assert [mixer.num_heads for mixer in config.attention_layers] == [6, 6, 3, 6, 3]
    assert [mixer.num_heads for mixer in config.kv_layers] == [6, 6, 6]
    assert config.rope_at_length(64) == {"rope_type": "default", "rope_theta": 500000.0}
    assert ModelConfig.from_description(json.loads(json.dumps(config.to_description()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_source_layer": -1}, r"AttentionConfig\.kv_source_layer: expected an integer from 0 to 9999, got -1"),
        ({"kv_source_layer": 10000}, r"AttentionConfig\.kv_source_layer: expected an integer from 0 to 9999, got 10000"),
        (
            {"kv_source_layer": 2},
            r"layers\[2\]\.mixer\.kv_source_layer: expected an earlier attention layer that stores 3 heads of 16, got layer 2",
        ),
        ({"kv_source_layer": 3}, r"layers\[2\]\.mixer\.kv_source_layer: expected an earlier attention layer .*, got layer 3"),
        ({"kv_source_layer": 99}, r"layers\[2\]\.mixer\.kv_source_layer: expected an earlier attention layer .*, got layer 99"),
        ({"num_kv_heads": 2}, r"expected an earlier attention layer that stores 2 heads of 16, got layer 1"),
        ({"head_dim": 32}, r"expected an earlier attention layer that stores 3 heads of 32, got layer 1"),
        ({"v_norm_epsilon": 1e-6}, r"v_norm_epsilon: expected none in a layer that reads K and V of another, got 1e-06"),
        ({"values_are_keys": True}, r"values_are_keys: expected none in a layer that reads K and V of another, got True"),
        (
            {"qk_norm": QkNormConfig(norm=NormConfig(epsilon=1e-5), after_rope=True)},
            r"QkNormConfig\.after_rope: expected False in a layer that reads K and V of another, got True",
        ),
    ],
)
def test_layers_that_cannot_read_k_and_v_of_another_one(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharing(**changes)


def test_a_layer_reads_no_rows_of_a_layer_that_reads_others_itself() -> None:
    config = sharing()
    chained = replace(config.layers[4], mixer=replace(config.layers[4].attention, kv_source_layer=2))
    with pytest.raises(ConfigError, match=r"layers\[4\]\.mixer\.kv_source_layer: expected an earlier attention layer .*, got layer 2"):
        replace(config, layers=(*config.layers[:4], chained))


def with_mamba(**changes: Any) -> LayerConfig:
    """Return an attention layer with Mamba-2 next to it."""
    norm = NormConfig(epsilon=1e-5)
    mamba = Mamba2Config(num_heads=4, head_dim=8, state_size=16, num_groups=2, kernel=4, norm=norm)
    layer = ModelConfig.from_dict(new_spelling()).layers[0]
    return replace(layer, **{"parallel_mixer": mamba, **changes})


def test_a_layer_with_a_second_mixer_stores_k_and_v_and_states() -> None:
    config = ModelConfig.from_dict(new_spelling())
    both, alone = with_mamba(), replace(with_mamba(), mixer=with_mamba().parallel_mixer, parallel_mixer=None)
    config = replace(config, layers=(config.layers[0], both, alone))
    assert (config.kv_indices, config.recurrent_indices) == ((0, 1), (1, 2))
    assert config.kv_layers == (config.layers[0].mixer, both.mixer)
    assert config.recurrent_layers == (both.parallel_mixer, alone.mixer)
    assert ModelConfig.from_description(json.loads(json.dumps(config.to_description()))) == config


@pytest.mark.parametrize(
    "changes", [{"mixer": None}, {"mixer": with_mamba().parallel_mixer}, {"input_norm": None}, {"parallel": True, "mlp_norm": None}]
)
def test_a_second_mixer_needs_attention_and_its_norm(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"LayerConfig\.parallel_mixer: expected attention, an input_norm and no parallel MLP"):
        with_mamba(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": None, "gate_first": False}, r"Mamba2Config\.gate_first: expected True without a norm, got False"),
        ({"input_multiplier": 0.0}, r"Mamba2Config\.input_multiplier: expected a finite number > 0, got 0"),
        ({"projection_multipliers": (1.0, 2.0)}, r"Mamba2Config\.projection_multipliers: expected 5 numbers or none, got 2"),
        ({"projection_multipliers": (1.0, 2.0, 3.0, 4.0, -5.0)}, r"Mamba2Config\.projection_multipliers\[4\]: expected a finite number"),
    ],
)
def test_contradictions_of_mamba_2(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(with_mamba().parallel_mixer, **changes)


@pytest.mark.parametrize("name", ["residual_multiplier", "parallel_mixer_multiplier", "mlp_residual_multiplier"])
def test_multipliers_of_a_layer_are_positive_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"LayerConfig\.{name}: expected a finite number > 0, got 0"):
        with_mamba(**{name: 0.0})


def test_factors_of_the_projections_of_mamba_2_have_the_compute_dtype() -> None:
    mixer = replace(with_mamba().parallel_mixer, projection_multipliers=(0.1, 0.2, 0.3, 0.4, 0.5))
    for dtype in ("float32", "bfloat16"):
        factors = mixer.projection_factors(dtype)
        assert factors.dtype.name == dtype
        expected = [0.1] * 32 + [0.2] * 32 + [0.3] * 32 + [0.4] * 32 + [0.5] * 4
        np.testing.assert_array_equal(factors, np.array(expected).astype(factors.dtype))
    assert with_mamba().parallel_mixer.projection_factors("float32") is None


@pytest.mark.parametrize(
    ("embedding", "size", "message"),
    [
        (None, 8, r"ModelConfig\.layers\[1\]\.per_layer_input\.size: expected None, the size of per_layer_embedding, got 8"),
        ({"size": 4}, 8, r"ModelConfig\.layers\[1\]\.per_layer_input\.size: expected 4, the size of per_layer_embedding, got 8"),
        ({"size": 4}, None, r"ModelConfig\.per_layer_embedding: expected none without a layer that has a per_layer_input"),
        ({"vocab_size": 60}, 8, r"ModelConfig\.per_layer_embedding\.vocab_size: expected at least 61, a row of each token, got 60"),
    ],
)
def test_per_layer_embeddings_that_contradict_their_layers(embedding: dict[str, int] | None, size: int | None, message: str) -> None:
    norm = NormConfig(epsilon=1e-5)
    config = ModelConfig.from_dict(new_spelling())
    given = None if size is None else PerLayerInputConfig(size=size, activation="silu", output_norm=norm)
    layers = (config.layers[0], replace(config.layers[1], per_layer_input=given))
    sizes = {"vocab_size": 61, "size": 8}
    whole = None if embedding is None else PerLayerEmbeddingConfig(**{**sizes, **embedding}, norm=norm)
    with pytest.raises(ConfigError, match=message):
        replace(config, layers=layers, per_layer_embedding=whole)
    fitting = PerLayerEmbeddingConfig(**sizes, norm=norm)
    fits = (config.layers[0], replace(layers[1], per_layer_input=PerLayerInputConfig(size=8, activation="silu", output_norm=norm)))
    model = replace(config, layers=fits, per_layer_embedding=fitting)
    assert ModelConfig.from_description(json.loads(json.dumps(model.to_description()))) == model
