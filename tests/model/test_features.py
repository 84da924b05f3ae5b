"""What a model needs of an engine, and that engines refuse what they do not compute before they read a weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.models import SMALL, features_of, with_mixer
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import (
    ClampedSwiGLU,
    GatedDeltaNetConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    NormConfig,
    QkNormConfig,
    QueryScaling,
    RopeConfig,
    RoutedMlpConfig,
    RouterConfig,
)
from trt_kvcache.model.features import FEATURES, check_features, features

MODEL = ModelConfig.from_dict({**SMALL, "num_hidden_layers": 2})
NORM = NormConfig(epsilon=1e-5)
DELTA_NET = GatedDeltaNetConfig(num_key_heads=2, key_head_dim=8, num_value_heads=4, value_head_dim=16, kernel=3, norm=NORM)
MAMBA = Mamba2Config(num_heads=4, head_dim=8, state_size=16, num_groups=2, kernel=4, norm=NORM)
EXPERTS = RoutedMlpConfig(router=RouterConfig(num_experts=6, experts_per_token=2), expert=MlpConfig(intermediate_size=28))
ROPE = RopeConfig(kind="default", theta=10000.0)


def in_last_layer(**changes: Any) -> ModelConfig:
    return replace(MODEL, layers=(MODEL.layers[0], replace(MODEL.layers[1], **changes)))


def in_every_layer(**changes: Any) -> ModelConfig:
    return replace(MODEL, layers=tuple(replace(layer, **changes) for layer in MODEL.layers))


def with_last_mixer(**changes: Any) -> ModelConfig:
    return in_last_layer(mixer=replace(MODEL.layers[1].mixer, **changes))


CASES = {
    "window": (with_last_mixer(window=5), "layers[1].mixer.window = 5"),
    "softcap": (with_last_mixer(softcap=50.0), "layers[1].mixer.softcap = 50.0"),
    "sinks": (with_mixer(MODEL, sinks=True), "layers[0].mixer.sinks = True"),
    "v_norm": (with_mixer(MODEL, v_norm_epsilon=0.1), "layers[0].mixer.v_norm_epsilon = 0.1"),
    "values_are_keys": (with_mixer(MODEL, values_are_keys=True), "layers[0].mixer.values_are_keys = True"),
    "output_scale": (in_last_layer(output_scale=True), "layers[1].output_scale = True"),
    "scale": (with_last_mixer(scale=0.5), "layers[1].mixer.scale = 0.5"),
    "query_scaling": (with_last_mixer(query_scaling=QueryScaling(beta=0.1, period=8)), "layers[1].mixer.query_scaling = QueryScaling("),
    "no_rope": (with_mixer(MODEL, rope=None), "layers[0].mixer.rope = None"),
    "partial_rotary": (
        with_mixer(MODEL, rope=replace(ROPE, partial_rotary_factor=0.5)),
        "layers[0].mixer.rope.partial_rotary_factor = 0.5",
    ),
    "several_ropes": (with_last_mixer(rope=replace(ROPE, theta=7.0)), "layers[1].mixer.rope"),
    "full_qk_norm": (with_mixer(MODEL, qk_norm=QkNormConfig(norm=NORM, over="full")), "layers[0].mixer.qk_norm.over = full"),
    "norm_after_rope": (with_mixer(MODEL, qk_norm=QkNormConfig(norm=NORM, after_rope=True)), "layers[0].mixer.qk_norm.after_rope = True"),
    "several_shapes": (with_last_mixer(head_dim=16), "layers[1] = (4, 2, 16, 28, "),
    "norm_offset": (in_last_layer(mlp_norm=replace(NORM, weight_offset=1.0)), "layers[1].mlp_norm.weight_offset = 1.0"),
    "norm_rounding": (
        replace(MODEL, final_norm=replace(NORM, rounds_before_weight=False)),
        "final_norm.rounds_before_weight = False",
    ),
    "layer_norm": (in_last_layer(mlp_norm=replace(NORM, centered=True, rounds_before_weight=False)), "layers[1].mlp_norm.centered = True"),
    "norm_places": (in_last_layer(mlp_output_norm=NORM), "layers[1] norms"),
    "parallel": (in_last_layer(parallel=True, mlp_norm=None), "layers[1].parallel = True"),
    "activation": (in_last_layer(mlp=replace(MODEL.layers[1].mlp, activation="gelu_tanh")), "layers[1].mlp.activation = gelu_tanh"),
    "clamped_swiglu": (
        in_last_layer(mlp=replace(MODEL.layers[1].mlp, activation=ClampedSwiGLU(alpha=1.5, limit=7.0))),
        "layers[1].mlp.activation = ClampedSwiGLU(alpha=1.5, limit=7.0)",
    ),
    "relu2": (in_last_layer(mlp=replace(MODEL.layers[1].mlp, activation="relu2")), "layers[1].mlp.activation = relu2"),
    "ungated_mlp": (in_every_layer(mlp=replace(MODEL.layers[1].mlp, gated=False)), "layers[0].mlp.gated = False"),
    "output_gate": (with_mixer(MODEL, output_gate=True), "layers[0].mixer.output_gate = True"),
    "projection_multipliers": (with_last_mixer(input_multiplier=0.5), "layers[1].mixer.input_multiplier = 0.5"),
    "gated_delta_net": (in_last_layer(mixer=DELTA_NET), "layers[1].mixer = GatedDeltaNetConfig("),
    "experts": (in_every_layer(mlp=EXPERTS), "layers[0].mlp.router.num_experts = 6"),
    "no_mlp": (in_last_layer(mlp=None, mlp_norm=None), "layers[1].mlp = None"),
    "no_mixer": (in_last_layer(mixer=None, input_norm=None), "layers[1].mixer = None"),
    "residual_multiplier": (in_last_layer(residual_multiplier=0.5), "layers[1].residual_multiplier = 0.5"),
    "embedding_multiplier": (replace(MODEL, embedding_multiplier=12.0), "embedding_multiplier = 12.0"),
    "final_softcap": (replace(MODEL, final_softcap=30.0), "final_softcap = 30.0"),
    "logits_divisor": (replace(MODEL, logits_divisor=8.0), "logits_divisor = 8.0"),
}


def test_llama_needs_none() -> None:
    assert features(MODEL) == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("phi3-long", {"partial_rotary", "fused_tensors"}),
        ("smollm3", {"no_rope"}),
        ("qwen3_moe-dense-window", {"window", "several_shapes", "experts"}),
        ("olmo2", {"full_qk_norm", "norm_rounding", "norm_places"}),
        ("olmo3", {"window", "several_ropes", "full_qk_norm", "norm_rounding", "norm_places"}),
        ("ernie4_5", {"interleaved_rope"}),
        ("exaone4", {"window", "no_rope", "norm_places"}),
        ("glm4", {"interleaved_rope", "partial_rotary", "norm_places", "fused_tensors"}),
        ("hunyuan", {"norm_after_rope"}),
        ("starcoder2", {"layer_norm", "ungated_mlp", "activation"}),
        ("stablelm", {"layer_norm", "partial_rotary"}),
        ("stablelm-bias", {"layer_norm", "partial_rotary", "parallel"}),
        ("falcon_h1", {"parallel_mixers", "mamba2", "no_scan_norm", "scale", "residual_multiplier", "projection_multipliers"}
                      | {"embedding_multiplier", "logits_divisor"}),
        ("falcon_h1-bias", {"parallel_mixers", "mamba2", "gate_after_norm", "projection_multipliers", "logits_divisor"}),
        ("cohere2", {"layer_norm", "parallel", "interleaved_rope", "no_rope", "window", "logits_divisor"}),
        ("gemma3", {"window", "scale", "several_ropes", "norm_offset", "norm_rounding", "norm_places", "activation"}
                   | {"embedding_multiplier", "final_softcap"}),
        ("gemma4", {"window", "scale", "several_ropes", "several_shapes", "v_norm", "values_are_keys", "norm_rounding", "norm_places"}
                   | {"output_scale", "activation", "embedding_multiplier", "final_softcap"}),
        ("gemma4-shared", {"window", "scale", "several_ropes", "several_shapes", "v_norm", "values_are_keys", "norm_rounding"}
                   | {"norm_places", "output_scale", "activation", "embedding_multiplier", "final_softcap", "shared_kv"}),
        ("gemma4-ple", {"window", "scale", "several_ropes", "several_shapes", "v_norm", "norm_rounding", "norm_places", "output_scale"}
                   | {"activation", "embedding_multiplier", "final_softcap", "shared_kv", "per_layer_embeddings"}),
        ("gemma4-experts", {"window", "scale", "several_ropes", "several_shapes", "v_norm", "values_are_keys", "norm_rounding"}
                           | {"norm_places", "output_scale", "activation", "embedding_multiplier", "final_softcap"}
                           | {"experts", "shared_expert", "router_norm", "expert_scale", "branch_norms"}),
    ],
)  # fmt: skip
def test_what_families_need(name: str, expected: set[str]) -> None:
    assert set(features_of(name)) == expected


@pytest.mark.parametrize(
    ("name", "place", "changes"),
    [
        ("projection_multipliers", "mlp.gate_multiplier = 0.5", {"mlp": {"gate_multiplier": 0.5}}),
        ("projection_multipliers", "parallel_mixer.input_multiplier = 0.5", {"parallel_mixer": {"input_multiplier": 0.5}}),
        ("projection_multipliers", "parallel_mixer.projection_multipliers = (", {"parallel_mixer": {"projection_multipliers": (2.0,) * 5}}),
        ("no_scan_norm", "parallel_mixer.norm = None", {"parallel_mixer": {"norm": None}}),
        ("gate_after_norm", "parallel_mixer.gate_first = False", {"parallel_mixer": {"gate_first": False}}),
        ("residual_multiplier", "mlp_residual_multiplier = 0.5", {"mlp_residual_multiplier": 0.5}),
        ("residual_multiplier", "parallel_mixer_multiplier = 0.5", {"parallel_mixer_multiplier": 0.5}),
    ],
)
def test_features_of_a_layer_with_a_second_mixer(name: str, place: str, changes: dict[str, Any]) -> None:
    layer = replace(MODEL.layers[0], parallel_mixer=MAMBA)
    parts = {part: replace(getattr(layer, part), **new) if isinstance(new, dict) else new for part, new in changes.items()}
    model = replace(MODEL, layers=(replace(layer, **parts),))
    found = features(model)
    assert set(found) == {"parallel_mixers", "mamba2", name}
    assert found["parallel_mixers"] == "layers[0].parallel_mixer.kind = mamba2"
    assert found[name].startswith(f"layers[0].{place}")


@pytest.mark.parametrize("name", CASES)
def test_a_feature_is_found_where_it_is(name: str) -> None:
    model, place = CASES[name]
    found = features(model)
    assert list(found) == [name]
    assert found[name].startswith(place)


@pytest.mark.parametrize("name", CASES)
def test_an_engine_without_it_refuses_it_by_name(name: str) -> None:
    model, _ = CASES[name]
    check_features(model, {name}, "this engine")
    with pytest.raises(ConfigError) as raised:
        check_features(model, set(FEATURES) - {name}, "this engine")
    assert str(raised.value).endswith(f': this engine does not support {FEATURES[name]} yet (llama). engine="numpy" does.')
