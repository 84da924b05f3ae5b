"""Families: defaults of absent fields, and what each refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.paths import GOLDEN
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.families.registry import FAMILIES

DEFAULTS = json.loads((GOLDEN / "defaults.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    for name, expected in DEFAULTS[family].items():
        assert FAMILIES[family].defaults.get(name, False if isinstance(expected, bool) else None) == expected, name


def golden(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")), **changes})


def test_windows_of_gemma_alternate_where_nothing_else_is_said() -> None:
    assert [layer.mixer.window for layer in golden("gemma2", num_hidden_layers=4).layers] == [7, None, 7, None]
    assert [layer.mixer.window for layer in golden("gemma3", sliding_window_pattern=2).layers] == [6, None, 6, None]


def test_one_row_of_layers_without_rope_is_as_the_list_says() -> None:
    with_rope = [layer.mixer.rope is not None for layer in golden("smollm3", no_rope_layers=[1, 0, 0, 1]).layers]
    assert with_rope == [True, False, False, True]
    with_rope = [layer.mixer.rope is not None for layer in golden("smollm3", no_rope_layer_interval=3).layers]
    assert with_rope == [True, True, False, True]


def test_gemma_3_has_two_kinds_of_rope_in_either_spelling() -> None:
    old = golden("gemma3", rope_scaling=None)
    ropes = {"full_attention": {"rope_theta": 2000.0}, "sliding_attention": {"rope_theta": 50.0}}
    assert golden("gemma3", rope_scaling=None, rope_theta=1.0, rope_local_base_freq=2.0, rope_parameters=ropes) == old


def test_code_that_transformers_has_taken_over_is_no_custom_code() -> None:
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert golden("phi3-long", auto_map=code) == golden("phi3-long")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3-long", {"auto_map": {"AutoConfig": "other.Config"}}, "auto_map: a model with custom code"),
        ("phi3-long", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: expected default or longrope .* got linear"),
        ("phi3-long", {"partial_rotary_factor": 0.5}, "short_factor: expected 8 factors, one for each frequency, got 12"),
        ("phi3-long", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected more than 0 and at most 1, got 1.5"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 "),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types: expected full_attention everywhere"),
        ("mistral-window", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types: expected 3 as num_hidden_layers"),
        ("ministral3", {"rope_parameters": None}, "rope_parameters: expected an object, got none"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, r"rope_parameters\.llama_4_scaling_beta: expected a value"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: a model with attention to later tokens"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation: 'relu' is not supported"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types: chunked_attention is not"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: a model with soft-capped attention"),
        ("gemma3", {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters: expected one object for full_attention and one for"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 4 numbers, 1 for a layer with RoPE"),
        ("olmo2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supported for model_type 'olmo2'"),
        ("lfm2-bias", {"full_attn_idxs": [4]}, r"full_attn_idxs: expected a list of indices of layers, from 0 to 3, got \[4\]"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types: mamba is not supported"),
        ("lfm2", {"num_experts": 4}, "num_experts: a model with mixture of experts"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache: expected a positive integer, got 0"),
        ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices: expected a list of indices of layers, from 0 to 2, got 1"),
        ("bamba", {"mamba_d_head": 8}, "mamba_d_head: expected 16, mamba_expand"),
        ("bamba", {"mamba_n_groups": 3}, "Mamba2Config.num_groups: expected a divisor of num_heads=4, got 3"),
        ("bamba", {"time_step_limit": [1.0, 0.5]}, "time_step_limit: expected two numbers, 0 <= smallest <= largest"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier: expected a finite number > 0, got 0"),
        ("granite", {"num_local_experts": 8}, "num_local_experts: a model with mixture of experts"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        golden(name, **changes)
