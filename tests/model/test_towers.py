"""Models with a vision tower: the description of the text decoder alone, and fields that contradict each other."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.golden.weights import VISION_SEEDS
from tests.helpers.models import text_config, vision_config
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.families.family import PER_LAYER_EMBEDDING
from trt_kvcache.model.families.registry import FAMILIES


def changed(name: str, text: dict[str, Any] | None = None, **outer: Any) -> ModelConfig:
    config = {**vision_config(name), **outer}
    return ModelConfig.from_dict({**config, "text_config": {**config["text_config"], **(text or {})}})


@pytest.mark.parametrize("name", VISION_SEEDS)
def test_the_computation_is_that_of_the_text_decoder(name: str) -> None:
    config = vision_config(name)
    model = ModelConfig.from_dict(config)
    assert model == replace(ModelConfig.from_dict(text_config(name)), family=config["model_type"])
    assert ModelConfig.from_description(json.loads(json.dumps(model.to_description()))) == model


def test_token_ids_next_to_the_text_decoder_take_precedence_and_null_is_none_stated() -> None:
    text = {"bos_token_id": 4, "eos_token_id": 5}
    assert changed("gemma3-bias", text, eos_token_id=[3, 7]).eos_token_ids == (3, 7)
    assert changed("gemma3-bias", text, eos_token_id=None).eos_token_ids == (5,)
    assert changed("gemma3-bias", text).bos_token_id == 4


@pytest.mark.parametrize("place", ["outer", "text"])
def test_a_tied_head_is_stated_in_either_place(place: str) -> None:
    stated = {"tie_word_embeddings": False}
    assert not changed("gemma3", {"tie_word_embeddings": True}, **stated).tie_word_embeddings
    assert changed("gemma3", {"dtype": "float32", "torch_dtype": "float32"}, dtype="bfloat16", torch_dtype="bfloat16").dtype == "bfloat16"
    assert not (changed("gemma3", **stated) if place == "outer" else changed("gemma3", stated)).tie_word_embeddings
    assert changed("gemma3").tie_word_embeddings


def test_gemma_4_has_towers_of_images_and_sounds() -> None:
    assert changed("gemma4", audio_config={"hidden_size": 8}) == changed("gemma4")
    family = FAMILIES["gemma4"]
    assert family.own_name("model.language_model.embed_tokens_per_layer.weight") == PER_LAYER_EMBEDDING
    parts = ("vision_tower.encoder", "audio_tower.layers", "embed_vision.embedding_projection", "embed_audio.embedding_projection")
    assert all(family.ignores(f"model.{part}.weight") for part in parts)
    unified = FAMILIES["gemma4_unified"]
    assert unified.ignores("model.vision_embedder.patch_dense.weight")
    assert not unified.ignores("model.language_model.norm.weight")


def test_a_dtype_that_is_stated_nowhere_is_the_default() -> None:
    config = {**vision_config("gemma3"), "torch_dtype": None}
    assert ModelConfig.from_dict(config, default_dtype="float32").dtype == "float32"
    with pytest.raises(ConfigError, match=r"^dtype: None is not supported"):
        ModelConfig.from_dict(config)
    assert ModelConfig.from_dict({**vision_config("gemma3-bias"), "tie_word_embeddings": None}, default_dtype="float32").dtype == "bfloat16"


def test_fields_without_a_text_config_are_those_of_qwen_2_5_vl() -> None:
    config = vision_config("qwen2_5_vl")
    whole = {name: config[name] for name in ("architectures", "model_type", "vision_config")}
    inner = {name: value for name, value in config.items() if name not in whole}
    assert ModelConfig.from_dict({**whole, "text_config": inner}) == ModelConfig.from_dict(config)
    stale = {**config, "hidden_size": 1, "text_config": inner}  # files of transformers 4.5x have both: the text_config is the model
    assert ModelConfig.from_dict(stale) == ModelConfig.from_dict(config)
    with pytest.raises(ConfigError, match=r"^text_config: expected an object, got None"):
        ModelConfig.from_dict({**config, "model_type": "qwen3_vl", "architectures": None})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gemma4", {"model_type": "gemma4_unified_text"}, "text_config.model_type: expected gemma4_text for model_type 'gemma4', got"),
        ("gemma4", {"vision_config": {"a": 1}}, "vision_config: .* is a vision model"),
        ("gemma4", {"audio_config": {"a": 1}}, "audio_config: .* is an audio model"),
        ("gemma4_unified", {"enable_moe_block": True}, "enable_moe_block: .* has a mixture of experts"),
        ("gemma4_unified", {"num_experts": 128}, "num_experts: .* has a mixture of experts"),
        ("gemma4_unified", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: expected 0 or nothing, .*, got 8"),
        ("gemma4_unified", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected null or vision"),
        ("qwen3_vl", {"use_sliding_window": True}, "use_sliding_window: expected false, got True"),
        ("qwen3_vl", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types: sliding_attention is not"),
        ("qwen3_vl", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [6, 5, 5]}}, "rope_scaling: RoPE scaling 'mrope' is not su"),
        ("qwen3_vl", {"rope_scaling": {"rope_type": "default", "sections": [6, 5, 5]}}, "rope_scaling: expected only .*, got sections as"),
        ("qwen3_vl", {"num_experts": 8}, "num_experts: .* has a mixture of experts"),
        ("qwen3_vl", {"model_type": "qwen3"}, "text_config.model_type: expected qwen3_vl_text for model_type 'qwen3_vl', got 'qwen3'"),
        ("qwen2_5_vl-window", {"rope_parameters": {"rope_type": "linear", "type": "mrope"}}, "rope_parameters: expected `rope_type` and"),
        ("qwen2_5_vl-window", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types: expected full_attent"),
        (
            "mistral3",
            {"model_type": "mistral4"},
            "text_config.model_type: expected mistral or ministral3 for model_type 'mistral3', got 'm",
        ),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: expected true, got False"),
    ],
)
def test_what_a_text_decoder_does_not_compute_is_refused(name: str, text: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        changed(name, text)


@pytest.mark.parametrize(
    ("outer", "text", "message"),
    [
        ({"text_config": None}, None, "text_config: expected an object, got None"),
        ({"text_config": []}, None, r"text_config: expected an object, got \[\]"),
        ({"text_config": "gemma3_text"}, None, "text_config: expected an object, got 'gemma3_text'"),
        ({"text_config": {}}, None, "num_hidden_layers: expected a value, got none"),
        ({}, {"model_type": "llama"}, "text_config.model_type: expected gemma3_text for model_type 'gemma3', got 'llama'"),
        ({}, {"model_type": "gemma3"}, "text_config.model_type: expected gemma3_text for model_type 'gemma3', got 'gemma3'"),
        ({}, {"model_type": ["gemma3_text"]}, "text_config.model_type: expected gemma3_text for"),
        ({"torch_dtype": "float16"}, {"dtype": "float32"}, "dtype and torch_dtype: expected one value, got 'float32' and 'float16'"),
        ({}, {"use_bidirectional_attention": True}, "use_bidirectional_attention: .* has bidirectional attention, which is"),
        ({}, {"final_logit_softcapping": 6.0}, "final_logit_softcapping: .* has final logit softcapping, which is"),
        ({}, {"vision_config": {"depth": 1}}, "vision_config: .* is a vision model, which is not supported"),
        ({}, {"text_config": {"hidden_size": 1}}, "text_config: .* is more than a text decoder, which is not supported"),
        ({}, {"num_experts": 4}, "num_experts: .* has a mixture of experts"),
        ({"num_experts": 4}, {}, "num_experts: .* has a mixture of experts"),
        ({"audio_config": {"depth": 1}}, {}, "audio_config: .* is an audio model"),
        ({"auto_map": {"AutoConfig": "other.Config"}}, {}, r"auto_map: .* needs code of its own"),
        ({}, {"auto_map": {"AutoConfig": "other.Config"}}, r"auto_map: .* needs code of its own"),
        ({"architectures": ["Gemma3ForCausalLM"]}, {}, "architectures: expected Gemma3ForConditionalGeneration for model_type 'gemma3'"),
        ({}, {"num_attention_heads": 0}, "num_attention_heads: expected a positive integer, got 0"),
    ],
)
def test_contradictions_and_other_decoders_are_refused(outer: dict[str, Any], text: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        changed("gemma3", text, **outer) if text is not None else ModelConfig.from_dict({**vision_config("gemma3"), **outer})
