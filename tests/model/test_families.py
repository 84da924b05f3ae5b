"""Families: defaults of absent fields, and what each refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.paths import GOLDEN
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import (
    MlpConfig,
    ModelConfig,
    PerLayerEmbeddingConfig,
    PerLayerInputConfig,
    QueryScaling,
    RopeConfig,
    RoutedMlpConfig,
    RouterConfig,
)
from trt_kvcache.model.families.registry import FAMILIES

#: RoPE of Devstral 2, whose queries are not scaled.
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.0}

DEFAULTS = json.loads((GOLDEN / "defaults.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    for name, expected in DEFAULTS[family].items():
        assert FAMILIES[family].defaults.get(name, False if isinstance(expected, bool) else None) == expected, name


def test_rope_of_gpt_oss_is_yarn_where_nothing_else_is_said() -> None:
    mixers = [layer.attention for layer in golden("gpt_oss", rope_parameters=None, layer_types=None, sliding_window=3).layers]
    yarn = RopeConfig(kind="yarn", theta=150000.0, factor=32.0, attention_factor=0.1 * math.log(32) + 1, truncate=False)
    assert {mixer.rope for mixer in mixers} == {replace(yarn, original_max_position_embeddings=4096)}
    assert [mixer.window for mixer in mixers] == [3, None, 3, None]
    assert golden("gpt_oss").layers[0].attention.rope == RopeConfig(kind="linear", theta=70.0, factor=2.0)


def test_biases_and_sinks_of_gpt_oss() -> None:
    for name, bias in (("gpt_oss", False), ("gpt_oss-mxfp4", True)):
        (mixers, mlps) = ({getattr(layer, part) for layer in golden(name).layers} for part in ("mixer", "mlp"))
        assert {(mixer.sinks, mixer.qkv_bias, mixer.o_bias) for mixer in mixers} == {(True, bias, bias)}
        assert {(mlp.router.bias, mlp.expert.bias, mlp.router.renormalise) for mlp in mlps} == {(True, True, True)}


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


def test_heads_of_gemma_4_are_of_two_sizes_in_either_spelling() -> None:
    mixers = [layer.attention for layer in golden("gemma4").layers]
    assert [(mixer.num_kv_heads, mixer.head_dim, mixer.values_are_keys, mixer.window) for mixer in mixers] == [
        (2, 16, False, 6),
        (1, 24, True, None),
    ] * 2
    sizes = {"head_dim": 24, "num_key_value_heads": 1}
    assert golden("gemma4", global_head_dim=7, per_layer_config={"1": sizes, "3": sizes}) == golden("gemma4")
    assert [mixer.num_kv_heads for mixer in (layer.attention for layer in golden("gemma4", attention_k_eq_v=False).layers)] == [2] * 4
    assert golden("gemma4", global_head_dim=None).layers[1].attention.head_dim == 512


def test_the_last_layers_of_gemma_4_read_k_and_v_of_the_last_ones_of_their_types_before_them() -> None:
    layers = golden("gemma4-shared").layers
    assert [layer.attention.kv_source_layer for layer in layers] == [None, None, None, 1, 1, 2]
    assert [layer.mlp.intermediate_size for layer in layers] == [44] * 3 + [88] * 3
    assert [layer.attention.values_are_keys for layer in layers] == [False, False, True, False, False, False]
    narrow = golden("gemma4-shared", use_double_wide_mlp=False)
    assert {layer.mlp.intermediate_size for layer in narrow.layers} == {44}
    alone = golden("gemma4-shared", num_kv_shared_layers=None)
    assert {(layer.attention.kv_source_layer, layer.mlp.intermediate_size) for layer in alone.layers} == {(None, 44)}


def test_the_per_layer_embedding_of_gemma_4() -> None:
    model = golden("gemma4-ple")
    assert model.per_layer_embedding == PerLayerEmbeddingConfig(vocab_size=83, size=12, norm=model.final_norm)
    expected = PerLayerInputConfig(size=12, activation="gelu_tanh", output_norm=model.final_norm)
    assert {layer.per_layer_input for layer in model.layers} == {expected}
    absent = golden("gemma4-ple", hidden_size_per_layer_input=None, vocab_size_per_layer_input=3)
    assert (absent.per_layer_embedding, {layer.per_layer_input for layer in absent.layers}) == (None, {None})
    assert golden("gemma4-ple", vocab_size_per_layer_input=None).per_layer_embedding.vocab_size == 262144


def test_experts_of_gemma_4_are_next_to_a_dense_mlp() -> None:
    model = golden("gemma4-experts-ple")
    router = RouterConfig(num_experts=5, experts_per_token=3, renormalise=True, norm_epsilon=0.001, expert_scale=True)
    dense = [MlpConfig(intermediate_size=size) for size in (20, 20, 40, 40)]
    expert = MlpConfig(intermediate_size=36)
    expected = [RoutedMlpConfig(router=router, expert=expert, shared=shared, branch_norm=model.final_norm) for shared in dense]
    assert [layer.mlp for layer in model.layers] == expected
    assert {(layer.mlp_norm, layer.mlp_output_norm) for layer in model.layers} == {(None, model.final_norm)}
    single = golden("gemma4-experts-ple", enable_moe_block=False)
    assert [layer.mlp for layer in single.layers] == dense, "the number of experts is then ignored, as in transformers"
    assert {layer.mlp_norm for layer in single.layers} == {model.final_norm}


def test_gemma_4_without_its_optional_fields() -> None:
    model = golden("gemma4", layer_types=None, num_hidden_layers=7, rope_parameters=None)
    assert [layer.attention.window for layer in model.layers] == [6] * 5 + [None, None]
    ropes = {layer.attention.window: layer.attention.rope for layer in model.layers}
    assert ropes[6] == RopeConfig(kind="default", theta=1e4)
    assert ropes[None] == RopeConfig(kind="proportional", theta=1e6, partial_rotary_factor=0.25)


def test_the_scaling_of_older_files_of_olmo_3_belongs_to_full_attention() -> None:
    ropes = [layer.attention.rope for layer in golden("olmo3-bias-yarn", rope_theta=70.0).layers]
    assert [rope and (rope.kind, rope.theta) for rope in ropes] == [("yarn", 70.0), ("default", 70.0), ("yarn", 70.0)]
    assert golden("olmo3-bias-yarn", sliding_window=None, layer_types=["full_attention"] * 3).layers[1].attention.window is None


def test_full_attention_of_exaone_4_has_rope_only_without_windows() -> None:
    rotated = [(layer.attention.window, layer.attention.rope is not None) for layer in golden("exaone4").layers]
    assert rotated == [(7, True), (7, True), (None, False), (7, True)]
    no_window = golden("exaone4", sliding_window=None)
    assert {(layer.attention.window, layer.attention.rope is not None) for layer in no_window.layers} == {(None, True)}
    with_unused_window = golden("exaone4-full", sliding_window=9)
    assert {(layer.attention.window, layer.attention.rope) for layer in with_unused_window.layers} == {(None, None)}
    given = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    listed = golden("exaone4", layer_types=given, sliding_window_pattern="LLG")
    assert [layer.attention.window for layer in listed.layers] == [None, 7, 7, None]


def test_defaults_of_glm_4_that_transformers_sets_itself() -> None:
    assert golden("glm4", eos_token_id=None).eos_token_ids == (151329, 151336, 151338)
    dims = [golden("glm4", partial_rotary_factor=part).layers[0].attention.rotary_dim for part in (0.5, 0.75, None)]
    assert (golden("glm4").layers[0].attention.rotary_dim, *dims) == (12, 12, 18, 24)


def test_alpha_of_hunyuan_raises_the_base_of_rope() -> None:
    scaling = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    (mixer,) = {layer.attention for layer in golden("hunyuan", rope_scaling=scaling, rope_theta=10000.0).layers}
    assert mixer.rope == RopeConfig(kind="default", theta=10000.0 * 1000.0 ** (32 / 30))
    assert golden("hunyuan", rope_scaling={**scaling, "rope_theta": 7.0}).layers[0].attention.rope == replace(
        mixer.rope, theta=7.0 * 1000.0 ** (32 / 30)
    )
    (dynamic,) = {layer.attention.rope for layer in golden("hunyuan", rope_scaling={"type": "dynamic", "factor": 2.0}).layers}
    assert dynamic is not None
    assert (dynamic.kind, dynamic.factor) == ("dynamic", 2.0)


def test_only_layers_of_command_with_a_window_have_rope() -> None:
    layers = [(layer.attention.window, layer.attention.rope is not None) for layer in golden("cohere2").layers]
    assert layers == [(7, True), (7, True), (None, False), (7, True)]
    full = golden("cohere2", layer_types=["full_attention"] * 4, layer_switch=9, sliding_window=None)
    assert {(layer.attention.window, layer.attention.rope) for layer in full.layers} == {(None, None)}
    assert golden("cohere2", logit_scale=0.25).logits_divisor == 4


def test_rope_of_ministral_3_is_as_in_transformers_where_nothing_is_said() -> None:
    (mixer,) = {layer.mixer for layer in golden("ministral3", rope_parameters=None, max_position_embeddings=262144).layers}
    rope = mixer.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position_embeddings) == ("yarn", 1e6, 16.0, 16384)
    assert mixer.query_scaling == QueryScaling(beta=0.1, period=16384)


def test_a_scaling_of_queries_by_one_is_none() -> None:
    assert {layer.attention.query_scaling for layer in golden("ministral3", rope_parameters=_YARN).layers} == {None}


def test_infinity_is_read_as_transformers_writes_it() -> None:
    (mixer,) = {layer.mixer for layer in golden("mamba2", time_step_limit=[0.5, {"__float__": "Infinity"}]).layers}
    assert (mixer.dt_min, mixer.dt_max) == (0.5, None)


def test_older_names_of_nemotron_h_take_precedence() -> None:
    mixer = golden("nemotron_h", mamba_n_groups=4, mamba_d_conv=2, mamba_dt_min=0.5, mamba_conv_bias=False).layers[0].mixer
    assert (mixer.num_groups, mixer.kernel, mixer.dt_min, mixer.conv_bias) == (4, 2, 0.5, False)


def test_a_model_without_positions_has_no_limit_of_them() -> None:
    assert golden("mamba2").max_position_embeddings == 2**31 - 1


def test_code_that_transformers_has_taken_over_is_no_custom_code() -> None:
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    assert golden("phi3-long", auto_map=code) == golden("phi3-long")


def test_layers_with_experts_of_qwen3_moe() -> None:
    assert [isinstance(layer.mlp, RoutedMlpConfig) for layer in golden("qwen3_moe-dense-window", mlp_only_layers=None).layers] == [
        *(False, True, False, True),
    ]
    assert not any(isinstance(layer.mlp, RoutedMlpConfig) for layer in golden("qwen3_moe", num_experts=0, num_experts_per_tok=99).layers)
    assert golden("qwen3_moe", num_experts=None, num_local_experts=7) == golden("qwen3_moe", num_local_experts=7)
    assert {layer.mlp.router.num_experts for layer in golden("qwen3_moe", num_experts=None).layers} == {128}
    assert {layer.mlp.router.num_experts for layer in golden("mixtral", num_local_experts=None).layers} == {8}


def test_experts_of_the_hybrids() -> None:
    assert [isinstance(layer.mlp, RoutedMlpConfig) for layer in golden("lfm2_moe").layers] == [False, False, True, True]
    assert [isinstance(layer.mlp, RoutedMlpConfig) for layer in golden("lfm2_moe", num_dense_layers=9).layers] == [False] * 4
    assert [isinstance(layer.mlp, RoutedMlpConfig) for layer in golden("qwen3_next-experts").layers] == [True, False, True]
    granite = golden("granitemoehybrid-experts").layers[0].mlp
    assert (granite.expert.intermediate_size, granite.shared.intermediate_size, granite.shared_gate) == (20, 44, False)
    assert golden("granitemoehybrid", num_local_experts=0).layers[0].mlp == granite.shared
    nano, latent = golden("nemotron_h-experts").layers[1].mlp, golden("nemotron_h-latent").layers[1].mlp
    assert (nano.router.factor, nano.router.sum_epsilon, nano.latent_size) == (2.5, 1e-20, None)
    assert (latent.router.num_groups, latent.router.sum_epsilon, latent.latent_size, latent.latent_bias) == (4, 0, 16, True)
    assert (latent.expert.bias, latent.shared.bias, latent.expert.gated) == (False, True, False)


def test_a_model_is_found_by_the_class_name_of_older_files() -> None:
    expected = golden("ernie4_5")
    assert golden("ernie4_5", model_type=None) == golden("ernie4_5", architectures=["Ernie4_5ForCausalLM"]) == expected
    assert golden("ernie4_5", use_bias=None, head_dim=24) == expected
    assert golden("ernie4_5", head_dim=None).layers[0].attention.head_dim == 16


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phi3-long", {"auto_map": {"AutoConfig": "other.Config"}}, r"auto_map: .* needs code of its own \(trust_remote_code\), which is"),
        ("phi3-long", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: expected default or longrope .* got linear"),
        ("phi3-long", {"partial_rotary_factor": 0.5}, "short_factor: expected 8 factors, one for each frequency, got 12"),
        ("phi3-long", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected more than 0 and at most 1, got 1.5"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 "),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types: expected full_attention everywhere"),
        ("mistral-window", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types: expected 3 as num_hidden_layers"),
        ("ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": -0.1}}, "llama_4_scaling_beta: expected a finite number > 0"),
        ("ministral3", {"rope_parameters": {**_YARN, "llama_4_scaling_beta": False}}, "llama_4_scaling_beta: expected "),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, r"rope_parameters\.llama_4_scaling_beta: expected a value"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: .* has bidirectional attention, which is"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation: 'relu' is not supported"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer_types: chunked_attention is not"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: .* has attention logit softcapping, which is"),
        ("gemma3", {"rope_parameters": {"rope_theta": 3.0}}, "rope_parameters: expected one object for full_attention and one for"),
        ("gemma4-experts", {"num_experts": 0}, "top_k_experts: expected at most the number of experts, 0, got 2"),
        ("gemma4-experts", {"num_experts": 1}, "top_k_experts: expected at most the number of experts, 1, got 2"),
        ("gemma4-experts", {"top_k_experts": None}, "top_k_experts: expected a value, got none"),
        ("gemma4-experts", {"moe_intermediate_size": None}, "moe_intermediate_size: expected a value, got none"),
        ("gemma4", {"enable_moe_block": 1}, "enable_moe_block: expected true or false, got 1"),
        ("gemma4", {"attention_k_eq_v": "yes"}, "attention_k_eq_v: expected true or false, got 'yes'"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers: expected an integer from 0 to 3, got -1"),
        ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected an integer from 0 to 3, got 4"),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers: expected a number that leaves a layer of full_attention"),
        ("gemma4", {"num_kv_shared_layers": True}, "num_kv_shared_layers: expected an integer, got True"),
        ("gemma4", {"num_kv_shared_layers": 1.0}, r"num_kv_shared_layers: expected an integer, got 1\.0"),
        ("gemma4-shared", {"use_double_wide_mlp": "no"}, "use_double_wide_mlp: expected true or false, got 'no'"),
        ("gemma4-shared", {"intermediate_size": 2**30}, "intermediate_size: expected an integer from 1 to"),
        ("gemma4-ple", {"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input: expected an integer >= 0, got -8"),
        ("gemma4-ple", {"hidden_size_per_layer_input": 2.0}, r"hidden_size_per_layer_input: expected an integer, got 2\.0"),
        ("gemma4-ple", {"hidden_size_per_layer_input": "12"}, "hidden_size_per_layer_input: expected an integer, got '12'"),
        ("gemma4-ple", {"hidden_size_per_layer_input": 2**30}, r"per_layer_embedding\.size \* num_layers: expected an integer from 1 to"),
        ("gemma4-ple", {"vocab_size_per_layer_input": 70}, "vocab_size_per_layer_input: expected at least vocab_size=71, .*, got 70"),
        ("gemma4-ple", {"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input: expected a positive integer, got 0"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected null or vision"),
        ("gemma4", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types: expected full_attention for the last"),
        ("gemma4", {"rope_theta": 100.0}, "rope_theta: expected nothing, since rope_parameters has it"),
        ("gemma4", {"rope_parameters": {"full_attention": {"rope_theta": 3.0}}}, "rope_parameters: expected one object for full_attention"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            r"rope_parameters\..*rope_theta: expected a value",
        ),
        ("gemma4", {"global_head_dim": 15}, "head_dim: expected an even number"),
        ("gemma4", {"num_global_key_value_heads": 3}, "num_attention_heads: expected a multiple of num_key_value_heads=3, got 4"),
        ("gemma4-bias", {"per_layer_config": [16]}, "per_layer_config: expected an object whose names are indices of layers"),
        ("gemma4-bias", {"per_layer_config": {"3": {}}}, "per_layer_config: expected an object whose names are indices of layers"),
        ("gemma4-bias", {"per_layer_config": {"0": {"sliding_window": 3}}}, r"per_layer_config\.0: expected an object of head_dim and num"),
        (
            "gemma4-bias",
            {"per_layer_config": {"0": {"head_dim": 16}}},
            r"per_layer_config\.2: expected the sizes of the other layers of full",
        ),
        ("gemma4-bias", {"per_layer_config": {"0": {"head_dim": "16"}}}, r"per_layer_config\.0\.head_dim: expected a positive integer"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 4 numbers, 1 for a layer with RoPE"),
        (
            "smollm3-bias-window",
            {"use_sliding_window": False},
            "everywhere with use_sliding_window False, sliding_window 8, got sliding_att",
        ),
        (
            "smollm3-bias-window",
            {"use_sliding_window": None},
            "layer_types: expected full_attention everywhere with use_sliding_window None",
        ),
        (
            "smollm3-bias-window",
            {"sliding_window": None},
            "with use_sliding_window True, sliding_window None, got sliding_attention in layer 1",
        ),
        ("qwen3-sharded", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected full_attention everywhere with"),
        ("olmo2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supported for model_type 'olmo2'"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 3}, "layer_types: expected 4 as num_hidden_layers says, got 3"),
        ("olmo3", {"sliding_window": None}, "sliding_window: expected a positive integer with sliding_attention"),
        ("olmo3", {"sliding_window": 0}, "sliding_window: expected a positive integer, got 0"),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            "rope_parameters: expected one object for full_attention and one for sliding_attention, got others",
        ),
        ("olmo3-bias-yarn", {"rope_scaling": [4.0]}, "rope_scaling: expected an object"),
        (
            "ernie4_5",
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types: sliding_attention is not supported for model_type 'ernie4_5'",
        ),
        ("ernie4_5", {"compression_ratio": 2.0}, r"compression_ratio: expected 1 \(positions of RoPE as they are\), got 2.0"),
        ("ernie4_5", {"use_bias": "yes"}, "use_bias: expected true or false, got 'yes'"),
        ("ernie4_5", {"auto_map": {"AutoConfig": "configuration_ernie4_5_moe.Ernie4_5_MoeConfig"}}, "auto_map: .* needs code of its own"),
        (
            "ernie4_5",
            {"architectures": ["Ernie4_5_MoeForCausalLM"]},
            "architectures: expected Ernie4_5ForCausalLM for model_type 'ernie4_5'",
        ),
        ("exaone4", {"sliding_window_pattern": "LLG"}, "sliding_window_pattern: expected a positive integer, got 'LLG'"),
        ("exaone4", {"sliding_window": -1}, "sliding_window: expected a positive integer, got -1"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window: expected a positive integer with sliding_attention",
        ),
        ("exaone4-full", {"layer_types": ["full_attention"]}, "layer_types: expected 3 as num_hidden_layers says, got 1"),
        ("glm4", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supported for model_type 'glm4'"),
        ("glm4", {"partial_rotary_factor": 0.3}, "partial_rotary_factor: expected an even number of 2 or more of the 24 elements .* got 7"),
        ("glm4", {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ("hunyuan", {"use_qk_norm": False}, "use_qk_norm: expected true, got False"),
        ("hunyuan", {"use_cla": True}, "use_cla: expected false, got True"),
        ("hunyuan", {"mlp_bias": 1}, "mlp_bias: expected false, got 1"),
        ("hunyuan", {"norm_type": "layer_norm"}, "norm_type: expected rms, got 'layer_norm'"),
        ("hunyuan", {"attention_head_dim": 16}, "attention_head_dim: expected head_dim=32, got 16"),
        (
            "hunyuan",
            {"rope_scaling": {"type": "linear", "factor": 1.0, "alpha": 5.0}},
            r"rope_scaling\.alpha: expected none, unless the type",
        ),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 5.0}},
            r"rope_scaling\.alpha: expected none, unless .* factor 1",
        ),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 0}}, r"rope_scaling\.alpha: expected a finite number > 0"),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1e300}},
            r"rope_scaling\.alpha: expected a smaller number",
        ),
        (
            "hunyuan",
            {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 5.0, "beta": 1}},
            "rope_scaling: expected only .* got beta as",
        ),
        ("hunyuan", {"head_dim": 2, "attention_head_dim": 2}, "partial_rotary_factor: expected an even number of 4 or more"),
        ("olmo3", {"num_experts": 4}, "num_experts: .* has a mixture of experts"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type: expected layer_norm, got 'rms_norm'"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type: expected default, got 'gated'"),
        ("starcoder2", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ("starcoder2", {"norm_epsilon": 0}, "norm_epsilon: expected a finite number > 0, got 0"),
        ("starcoder2-window", {"layer_types": ["full_attention"] * 3}, "layer_types: expected sliding_attention everywhere"),
        ("stablelm", {"qk_layernorm": True}, r"qk_layernorm: .* has a LayerNorm for each head of q and k, which is not supported"),
        ("stablelm", {"layer_types": ["sliding_attention"] * 2}, "layer_types: sliding_attention is not supported"),
        ("cohere2", {"position_embedding_type": "rope"}, "position_embedding_type: expected rope_gptj, got 'rope'"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block: expected true, got False"),
        ("cohere2", {"use_gated_activation": False}, "use_gated_activation: expected true, got False"),
        ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved_layers: expected local_attn_first, got"),
        ("cohere2", {"rotary_pct": 0.5}, "rotary_pct: expected 1, got 0.5"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm: expected false, got True"),
        ("cohere2", {"layer_switch": 4}, "layer_switch: expected sliding_window_pattern=3, got 4"),
        ("cohere2", {"head_dim": 24}, "head_dim: expected hidden_size / num_attention_heads=4, got 24"),
        ("cohere2", {"tie_word_embeddings": False}, "use_embedding_sharing: expected tie_word_embeddings=False, got True"),
        ("cohere2", {"logit_scale": 0}, "logit_scale: expected a finite number > 0, got 0"),
        ("cohere2", {"logit_scale": 1e-310}, "ModelConfig.logits_divisor: expected a finite number"),
        (
            "cohere2",
            {"sliding_window": None},
            "sliding_window: expected a positive integer with sliding_attention",
        ),
        ("lfm2-bias", {"full_attn_idxs": [4]}, r"full_attn_idxs: expected a list of indices of layers, from 0 to 3, got \[4\]"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, "layer_types: mamba is not supported"),
        ("lfm2", {"num_experts": 4}, r"num_experts: .* has a mixture of experts"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache: expected a positive integer, got 0"),
        ("bamba", {"attn_layer_indices": 1}, "attn_layer_indices: expected a list of indices of layers, from 0 to 2, got 1"),
        ("bamba", {"mamba_d_head": 8}, "mamba_d_head: expected 16, which is mamba_expand . hidden_size / mamba_n_heads, or auto, got 8"),
        ("bamba", {"mamba_n_heads": 3}, "mamba_n_heads: expected a divisor of mamba_expand . hidden_size = 64, got 3"),
        ("bamba", {"mamba_n_groups": 3}, "Mamba2Config.num_groups: expected a divisor of num_heads=4, got 3"),
        ("bamba", {"time_step_limit": [1.0, 0.5]}, "time_step_limit: expected two numbers, 0 <= smallest <= largest"),
        ("bamba", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: expected silu, the activation of the convolutions"),
        ("qwen3_next", {"num_experts": 4}, "num_experts_per_tok: expected at most the number of experts, 4, got 10"),
        (
            "qwen3_next-experts",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size: expected a positive integer, got 0",
        ),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob: expected True or null, got False"),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers: expected \[\] or null, got \[1\]"),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: expected 1 or null, got 2"),
        ("qwen3_5_moe", {"num_experts": 0}, "num_experts_per_tok: expected at most the number of experts, 0, got 2"),
        ("lfm2_moe", {"layer_types": None}, "layer_types: expected a list of names, got None"),
        ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers: expected a number of layers >= 0, got -1"),
        ("lfm2_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor: expected a finite number > 0, got 0"),
        ("lfm2_moe", {"use_expert_bias": "yes"}, "use_expert_bias: expected true or false, got 'yes'"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: expected silu, the activation of the convolutions"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "GatedDeltaNetConfig.num_value_heads: expected a multiple of num_key_heads=2, got 3"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: expected true, got False"),
        ("qwen3_5", {"output_gate_type": "tanh"}, "output_gate_type: expected silu, got 'tanh'"),
        ("qwen3_5", {"layer_types": ["mamba"] * 4}, "layer_types: mamba is not supported"),
        ("mamba2", {"expand": 3}, "expand: expected expand . hidden_size = num_heads . head_dim = 64, got 96"),
        ("mamba2", {"hidden_act": "relu2"}, "hidden_act: expected silu"),
        ("falcon_h1", {"mamba_n_heads": 5}, "mamba_n_heads: expected a divisor of mamba_d_ssm = 48, got 5"),
        ("falcon_h1", {"mamba_d_head": 16}, "mamba_d_head: expected 8, which is mamba_d_ssm / mamba_n_heads, or auto, got 16"),
        ("falcon_h1-bias", {"mamba_d_head": 16}, "mamba_d_head: expected 24, which is mamba_expand . hidden_size / mamba_n_heads"),
        ("falcon_h1", {"attn_layer_indices": [1]}, r"attn_layer_indices: expected null, got \[1\]"),
        ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp: expected true, got False"),
        ("falcon_h1", {"mlp_multipliers": [1.5]}, r"mlp_multipliers: expected 2 numbers, got \[1.5\]"),
        ("falcon_h1", {"ssm_multipliers": [1, 2, 3, 4]}, r"ssm_multipliers: expected 5 numbers, got \[1, 2, 3, 4\]"),
        ("falcon_h1", {"ssm_multipliers": [1, 1, 1, 1, 0]}, r"ssm_multipliers\[4\]: expected a finite number > 0, got 0"),
        ("falcon_h1", {"lm_head_multiplier": 0}, "lm_head_multiplier: expected a finite number > 0, got 0"),
        ("falcon_h1", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: expected silu, the activation of the convolutions"),
        ("granitemoehybrid", {"num_local_experts": 8}, "num_experts_per_tok: expected a positive integer, got 0"),
        ("granitemoehybrid-experts", {"num_local_experts": 1}, "num_experts_per_tok: expected at most the number of experts, 1, got 2"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type: expected rope, nope or null, got 'alibi'"),
        ("nemotron_h-experts", {"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
        ("nemotron_h-experts", {"n_group": 4}, "RouterConfig.num_groups: expected groups of 2 or more of 6 experts, got 4"),
        (
            "nemotron_h-experts",
            {"num_local_experts": 8},
            "n_routed_experts: expected one number of experts, got n_routed_experts 6 and num_loc",
        ),
        ("nemotron_h-latent", {"topk_group": 1}, "experts_per_token: expected at most the 2 experts of groups_per_token=1, got 3"),
        ("nemotron_h-latent", {"moe_latent_size": 0}, "moe_latent_size: expected a positive integer, got 0"),
        ("nemotron_h", {"hybrid_override_pattern": "M-?-M"}, "hybrid_override_pattern: '?.'? is not supported, got it in layer 2"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "num_hidden_layers: expected 3 as hybrid_override_pattern says, got 5"),
        ("nemotron_h", {"hybrid_override_pattern": ""}, "hybrid_override_pattern: expected from 1 to 10000 kinds of layers"),
        ("nemotron_h-bias", {"layers_block_type": ["moe"], "n_routed_experts": 0}, "expected at most the number of experts, 0, got 2"),
        ("nemotron_h", {"sliding_window": 8}, "sliding_window: expected null, got 8"),
        ("nemotron_h", {"rms_norm_eps": 1e-6}, "rms_norm_eps: expected layer_norm_epsilon=1e-05, got 1e-06"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier: expected a finite number > 0, got 0"),
        ("granite", {"num_local_experts": 8}, r"num_local_experts: .* has a mixture of experts"),
        ("qwen3_moe", {"num_experts": "7"}, "num_experts: expected an integer, got '7'"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts: expected a number of experts >= 0, got -1"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts: expected one number of experts, got num_experts 7 and num_local_experts 8"),
        (
            "qwen3_moe",
            {"num_experts": 2**31 - 1},
            "ModelConfig.layers: expected at most 131072 experts of all layers together, got 6442450941",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 8}, "num_experts_per_tok: expected at most the number of experts, 7, got 8"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok: expected a positive integer, got 0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size: expected a positive integer, got 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected a positive integer, got 0"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers: expected a list of indices of layers, from 0 to 2, got \[3\]"),
        ("qwen3_moe", {"hidden_act": "relu"}, "hidden_act: 'relu' is not supported"),
        (
            "qwen3_moe",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types: expected full_attention everywhere with sliding_window None",
        ),
        (
            "qwen3_moe-dense-window",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types: expected sliding_attention everywhere with sliding_window 7",
        ),
        ("mixtral", {"num_local_experts": 0}, "num_experts_per_tok: expected at most the number of experts, 0, got 2"),
        ("mixtral", {"num_experts": 6}, "num_experts: expected one number of experts, got num_experts 6 and num_local_experts 5"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: expected null, got 8.0"),
        ("olmoe", {"head_dim": 16}, "head_dim: expected hidden_size / num_attention_heads, or null, got 16"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit: expected a finite number > 0, got 0"),
        ("gpt_oss", {"swiglu_limit": float("nan")}, "swiglu_limit: expected a finite number > 0, got nan"),
        ("gpt_oss", {"swiglu_alpha": "1"}, "swiglu_alpha: expected a finite number > 0, got '1'"),
        ("gpt_oss", {"attention_bias": "yes"}, "attention_bias: expected true or false, got 'yes'"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act: expected silu, whose clamped variant the experts have, got 'gelu'"),
        (
            "gpt_oss",
            {"sliding_window": None},
            "sliding_window: expected a positive integer with sliding_attention",
        ),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types: expected 4 as num_hidden_layers says, got 3"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types: chunked_attention is not supported"),
        ("gpt_oss", {"num_local_experts": 0}, "num_experts_per_tok: expected at most the number of experts, 0, got 2"),
        ("gpt_oss", {"num_experts": 6}, "num_experts: expected one number of experts, got num_experts 6 and num_local_experts 7"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token: expected 2, as num_experts_per_tok says, got 3"),
        ("gpt_oss", {"rope_parameters": {}}, "rope_parameters: expected an object with a rope_type, or null, got {}"),
        ("gpt_oss-mxfp4", {"initial_context_length": 4096}, "initial_context_length: expected 16, the original context of YaRN, got 4096"),
        (
            "gpt_oss-mxfp4",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "ramp": 2}},
            "rope_scaling: expected only .* got ramp",
        ),
    ],
)
def test_what_a_family_does_not_compute_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        golden(name, **changes)
