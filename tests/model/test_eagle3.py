"""EAGLE-3 heads as models: their configuration, their description, and their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trt_kvcache.errors import ConfigError
from trt_kvcache.model import Eagle3InputConfig, ModelConfig, NormConfig
from trt_kvcache.model.families.eagle3 import is_draft_head, read_eagle3_config
from trt_kvcache.model.features import features
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, looked_up_tensors, shared_tensors, tensor_shapes

#: As published for Llama 3.1 8B by SafeAILab.
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


def test_a_published_head() -> None:
    head = read_eagle3_config(PUBLISHED)
    assert head.eagle3_input == Eagle3InputConfig(norm=NormConfig(epsilon=1e-5), state_size=4096, num_logits=32000)
    assert head.eagle3_input.layers_of(32) == (2, 16, 29)
    assert (head.vocab_size, head.num_logits, head.hidden_inputs_width) == (128256, 32000, 4096)
    shapes = tensor_shapes(head)
    assert shapes["fc.weight"] == (4096, 3 * 4096)
    assert shapes[HEAD] == (32000, 4096)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 2 * 4096)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (4096, 4096)
    assert ("merged_input", "eagle3_input") in [(name, place) for name, place in features(head).items()]


def test_a_head_that_shares_tensors_has_the_others() -> None:
    head = read_eagle3_config(PUBLISHED)
    assert shared_tensors(head) == ()
    assert looked_up_tensors(head) == (embedding_name(head),)
    assert head.eagle3_input is not None
    sharing = replace(head, eagle3_input=replace(head.eagle3_input, shares_embedding=True, shares_head=True))
    assert shared_tensors(sharing) == (embedding_name(head), HEAD)
    assert looked_up_tensors(sharing) == ()
    assert {*tensor_shapes(head)} - {*tensor_shapes(sharing)} == {embedding_name(head), HEAD}


@pytest.mark.parametrize("changes", [{}, {"eagle_aux_hidden_state_layer_ids": [2, 16, 29], "norm_before_residual": True}], ids=str)
def test_its_description_gives_it_back(changes: dict[str, Any]) -> None:
    head = read_eagle3_config({**PUBLISHED, **changes})
    assert ModelConfig.from_description(head.to_description()) == head


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 9, 29], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8, 28]}},
            (2, 9, 29),
        ),
        ({"eagle_config": {"use_aux_hidden_state": True, "use_mtp_layernorm": False, "parallel_draft_step": None}}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 16, 29)),
    ],
    ids=str,
)
def test_layers_by_their_inputs_or_their_outputs(changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    head = read_eagle3_config({**PUBLISHED, **changes})
    assert head.eagle3_input is not None
    assert head.eagle3_input.layers_of(32) == layers


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (PUBLISHED, True),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["EagleLlamaForCausalLM"]}, True),
        ({"speculators_model_type": "eagle3"}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, False),
        ({"architectures": "Eagle"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_recognition(data: dict[str, Any], expected: bool) -> None:
    assert is_draft_head(data) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_size": 0}, "Eagle3InputConfig.state_size: expected an integer from 1 to"),
        ({"num_logits": -3}, "Eagle3InputConfig.num_logits: expected an integer from 1 to"),
        ({"state_layers": ()}, "Eagle3InputConfig: number of state_layers: expected an integer from 1 to"),
        ({"state_layers": (2, -1)}, "Eagle3InputConfig.state_layers: expected an integer from 0 to"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"norm": NormConfig(epsilon=1e-5), "state_size": 4, "num_logits": 5}
    with pytest.raises(ConfigError, match=message):
        Eagle3InputConfig(**{**values, **changes})
