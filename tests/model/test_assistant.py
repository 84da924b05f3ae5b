"""Gemma 4's assistants as models: their configuration, their description, and their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trt_kvcache.errors import ConfigError
from trt_kvcache.model import AssistantInputConfig, AttentionConfig, ModelConfig, TokenClusters
from trt_kvcache.model.families.gemma4_assistant import is_assistant, read_assistant_config
from trt_kvcache.model.features import features
from trt_kvcache.model.tensor_shapes import shared_tensors, tensor_shapes

SLIDING, FULL = "sliding_attention", "full_attention"

#: Sizes of an assistant of Gemma 4 E2B, with the fields that transformers requires.
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "vocab_size": 262144,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "dtype": "bfloat16",
    "text_config": TEXT,
}


def test_a_description() -> None:
    model = read_assistant_config(ASSISTANT)
    own = model.assistant_input
    assert own is not None
    assert (own.state_size, own.clusters) == (1536, TokenClusters(count=2048, chosen=32))
    assert [(mixer.window, mixer.num_kv_heads, mixer.head_dim) for mixer in own.kv_layers] == [(512, 1, 256), (None, 1, 512)]
    assert [layer.attention.kv_source_layer for layer in model.layers] == [0, 0, 0, 1]
    assert (model.kv_layers, model.kv_indices, model.kv_of_attention) == (own.kv_layers, (), (0, 0, 0, 1))
    assert (model.hidden_inputs_width, model.state_size, model.hidden_size, model.dtype) == (1536, 1536, 256, "bfloat16")
    assert (model.embedding_multiplier, model.final_softcap) == (1536**0.5, None)
    assert features(model)["merged_input"] == "assistant_input"
    assert ModelConfig.from_description(model.to_description()) == model


def test_tensors() -> None:
    shapes = tensor_shapes(read_assistant_config(ASSISTANT))
    assert shapes["model.embed_tokens.weight"] == (262144, 256)
    assert (shapes["pre_projection.weight"], shapes["post_projection.weight"]) == ((256, 3072), (1536, 256))
    assert shapes["masked_embedding.centroids.weight"] == (2048, 256)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (2048, 256)
    assert not [name for name in shapes if "k_proj" in name or "v_proj" in name or "k_norm" in name or "lm_head" in name]
    without = read_assistant_config({**ASSISTANT, "use_ordered_embeddings": False})
    assert "masked_embedding.centroids.weight" not in tensor_shapes(without)
    assert shared_tensors(without) == ()


def test_defaults_of_transformers() -> None:
    left_out = ("backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k")
    data = {name: value for name, value in ASSISTANT.items() if name not in left_out}
    text = {name: value for name, value in TEXT.items() if name != "num_kv_shared_layers"}
    assert read_assistant_config({**data, "text_config": text}) == read_assistant_config(ASSISTANT)
    unified = {"architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant"}
    inner = {name: value for name, value in text.items() if "per_layer_input" not in name} | {"model_type": "gemma4_unified_text"}
    own = read_assistant_config({**data, **unified, "text_config": inner}).assistant_input
    assert own is not None
    assert own.state_size == 3840


def test_places_in_the_cache_of_a_model() -> None:
    own = read_assistant_config(ASSISTANT).assistant_input
    assert own is not None
    sliding, full = own.kv_layers
    assert own.kv_places((sliding, full, sliding, full, sliding)) == (4, 3)
    with pytest.raises(ConfigError, match="expected a model with full attention, whose K and V the assistant reads, got one without"):
        own.kv_places((sliding, sliding))
    with pytest.raises(
        ConfigError, match="reads 1 heads of 128 in sliding-window attention, as the model has, got one that reads 1 of 256"
    ):
        own.kv_places((sliding, full, replace(sliding, head_dim=128)))


def test_kinds() -> None:
    assert is_assistant(ASSISTANT)
    assert not is_assistant(TEXT)
    assert not is_assistant({"model_type": ["gemma4_assistant"]})
    with pytest.raises(ConfigError, match="model_type: expected gemma4_assistant or gemma4_unified_assistant, got 'gemma4_text'"):
        read_assistant_config(TEXT)


MIXER = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, rope=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_size": 0}, "AssistantInputConfig.state_size: expected an integer from 1 to"),
        ({"kv_layers": ()}, "kv_layers: expected a layer with and one without a window, or one of them, got 0"),
        ({"kv_layers": (MIXER, MIXER)}, "kv_layers: expected a layer with and one without a window, or one of them, got 2"),
    ],
)
def test_wrong_inputs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AssistantInputConfig(**{"state_size": 4, "kv_layers": (MIXER,), **changes})


@pytest.mark.parametrize(
    ("count", "chosen", "message"),
    [(0, 1, "count: expected an integer from 1 to"), (3, 4, "chosen: expected an integer from 1 to 3, got 4")],
)
def test_wrong_clusters(count: int, chosen: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"TokenClusters.{message}"):
        TokenClusters(count=count, chosen=chosen)


@pytest.mark.parametrize("source", [None, 2])
def test_all_layers_read_the_model(source: int | None) -> None:
    model = read_assistant_config(ASSISTANT)
    first = replace(model.layers[0], mixer=replace(model.layers[0].attention, kv_source_layer=source))
    with pytest.raises(
        ConfigError, match=r"layers\[0\].mixer.kv_source_layer: expected one of 2 layers of the model of the assistant, got"
    ):
        replace(model, layers=(first, *model.layers[1:]))
