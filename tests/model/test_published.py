"""Fields of ``config.json`` as models are published with them: each is read as the model that it is, or refused by the name of a field.

A file in ``published/`` has the fields that say what is computed, and what is expected: ``is``, in words, or the message in ``refused``.
``stored_dtype``: dtype of the weights, where the fields name none.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby

import pytest

from tests.paths import ROOT
from trt_kvcache.errors import ConfigError
from trt_kvcache.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig, RoutedMlpConfig
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.layer_config import Mixer
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig

FILES = sorted((ROOT / "tests" / "model" / "published").glob("*.json"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def in_words(model: ModelConfig) -> list[str]:
    """Describe a model in lines: first what all layers share, then how many layers of which kind follow each other."""
    whole = [
        f"{model.family}: {model.num_layers} layers of {model.hidden_size}",
        f"{model.vocab_size} tokens",
        f"{model.max_position_embeddings} positions",
        *(["tied"] if model.tie_word_embeddings else []),
        *([f"embedding * {model.embedding_multiplier:g}"] if model.embedding_multiplier != 1 else []),
        *([f"logits / {model.logits_divisor:g}"] if model.logits_divisor != 1 else []),
        *([f"per-layer embedding of {model.per_layer_embedding.vocab_size} tokens"] if model.per_layer_embedding else []),
        *([f"logits capped at {model.final_softcap:g}"] if model.final_softcap else []),
        f"epsilon {model.final_norm.epsilon:g}{norm_in_words(model.final_norm)}",
        f"{model.dtype}, begins with {model.bos_token_id}, ends with {', '.join(map(str, model.eos_token_ids)) or 'nothing'}",
    ]
    runs = [(kind, len(list(layers))) for kind, layers in groupby(map(layer_in_words, model.layers))]
    kinds = Counter(map(layer_in_words, model.layers))
    if len(runs) > 4:  # a pattern
        return [", ".join(whole), *(f"{count} x {kind}" for kind, count in kinds.items()), "pattern " + pattern(runs)]
    return [", ".join(whole), *(f"{count} x {kind}" for kind, count in runs)]


def norm_in_words(norm: NormConfig) -> str:
    """Return the differences from Llama's norm."""
    centered = f", LayerNorm with{'' if norm.bias else 'out'} bias" if norm.centered else ""
    return (", 1 + weight" if norm.weight_offset else "") + centered


def pattern(runs: list[tuple[str, int]]) -> str:
    """Return the lengths of the runs, such as ``5 1 5 1 2``."""
    return " ".join(str(count) for _, count in runs)


def layer_in_words(layer: LayerConfig) -> str:
    mlp = layer.mlp
    norms = [
        name.removesuffix("_norm") for name in ("input_norm", "mixer_output_norm", "mlp_norm", "mlp_output_norm") if getattr(layer, name)
    ]
    parts = mixer_in_words(layer.mixer)
    if layer.parallel_mixer is not None:
        first, *rest = states_in_words(layer.parallel_mixer)
        parts += [f"next to {first}", *rest]
        parts += [f"its output * {layer.parallel_mixer_multiplier:g}"] if layer.parallel_mixer_multiplier != 1 else []
    if isinstance(mlp, RoutedMlpConfig):
        parts += experts_in_words(mlp)
    elif mlp is not None:
        parts.append(mlp_in_words(mlp))
        parts += [f"gate * {mlp.gate_multiplier:g}"] if mlp.gate_multiplier != 1 else []
    parts.append(f"norms {' '.join(norms)}")
    parts += ["parallel"] if layer.parallel else []
    parts += ["scale of the output"] if layer.output_scale else []
    parts += [f"per-layer input of {layer.per_layer_input.size}"] if layer.per_layer_input else []
    parts += [f"residual * {layer.residual_multiplier:g}"] if layer.residual_multiplier != 1 else []
    parts += [f"MLP's residual * {layer.mlp_residual_multiplier:g}"] if layer.mlp_residual_multiplier is not None else []
    return ", ".join(parts)


def mlp_in_words(mlp: MlpConfig) -> str:
    activation = (
        mlp.activation if isinstance(mlp.activation, str) else f"clamped SwiGLU ({mlp.activation.alpha:g}, {mlp.activation.limit:g})"
    )
    return f"{'' if mlp.gated else 'ungated '}{activation} {mlp.intermediate_size}{' with bias' if mlp.bias else ''}"


def experts_in_words(mlp: RoutedMlpConfig) -> list[str]:
    router = mlp.router
    scores = f"{router.scores} scores{f' over their sum + {router.sum_epsilon:g}' if router.renormalise else ''}"
    return [
        f"{router.experts_per_token} of {router.num_experts} experts of {mlp_in_words(mlp.expert)}",
        scores + (f" * {router.factor:g}" if router.factor != 1 else "") + (" * scales of experts" if router.expert_scale else ""),
        *([f"norm of the router's input {router.norm_epsilon:g}"] if router.norm_epsilon is not None else []),
        *([f"{router.groups_per_token} of {router.num_groups} groups"] if router.num_groups > 1 else []),
        *[name for name in ("bias", "choice_bias") if getattr(router, name)],
        *([f"latent size {mlp.latent_size}{' with bias' if mlp.latent_bias else ''}"] if mlp.latent_size else []),
        *([f"shared {mlp_in_words(mlp.shared)}{' with a gate' if mlp.shared_gate else ''}"] if mlp.shared is not None else []),
        *(["norms of experts and shared expert"] if mlp.branch_norm is not None else []),
    ]


def mixer_in_words(mixer: Mixer | None) -> list[str]:
    if mixer is None:
        return []
    return attention_in_words(mixer) if isinstance(mixer, AttentionConfig) else states_in_words(mixer)


def states_in_words(mixer: RecurrentConfig) -> list[str]:
    if isinstance(mixer, GatedDeltaNetConfig):
        heads = f"{mixer.num_key_heads} heads of {mixer.key_head_dim} by {mixer.num_value_heads} of {mixer.value_head_dim}"
        return [f"gated delta net, {heads}", f"convolution by {mixer.kernel}"]
    if isinstance(mixer, Mamba2Config):
        limits = [f"time steps from {mixer.dt_min:g} to {mixer.dt_max}"] if mixer.dt_min or mixer.dt_max else []
        groups = f"{mixer.num_groups} of {mixer.state_size}"
        norms = ["no norm"] if mixer.norm is None else [] if mixer.gate_first else ["norm before the gate"]
        factors = " ".join(f"{factor:g}" for factor in mixer.projection_multipliers)
        return [
            f"Mamba-2, {mixer.num_heads} heads of {mixer.head_dim} by {groups}",
            f"convolution by {mixer.kernel}",
            *limits,
            *norms,
            *([f"input * {mixer.input_multiplier:g}"] if mixer.input_multiplier != 1 else []),
            *([f"projections * {factors}"] if factors else []),
            *[name for name in ("conv_bias", "bias", "out_bias") if getattr(mixer, name)],
        ]
    return [f"short convolution of {mixer.channels} channels by {mixer.kernel}{' with bias' if mixer.bias else ''}"]


def attention_in_words(mixer: AttentionConfig) -> list[str]:
    parts = [f"{mixer.num_heads}/{mixer.num_kv_heads} heads of {mixer.head_dim}"]
    if mixer.rope is None:
        parts.append("no RoPE")
    else:
        rope = {name: value for name, value in mixer.rope.to_dict().items() if name not in ("rope_type", "rope_theta")}
        numbers = [f"{name} {value:g}" for name, value in rope.items() if not isinstance(value, list | bool)]
        parts.append(" ".join([f"RoPE {mixer.rope.kind} {mixer.rope.theta:g}", *numbers]))
    parts += [f"window {mixer.window}"] if mixer.window else []
    parts += [] if mixer.kv_source_layer is None else [f"K and V of layer {mixer.kv_source_layer}"]
    parts += [f"scores capped at {mixer.softcap:g}"] if mixer.softcap else []
    parts += [f"scale {mixer.scale:g}"] if mixer.scale else []
    parts += [f"queries 1 + {mixer.query_scaling.beta:g} log by {mixer.query_scaling.period}"] if mixer.query_scaling else []
    parts += [f"norm of q and k ({mixer.qk_norm.over}){' after RoPE' if mixer.qk_norm.after_rope else ''}"] if mixer.qk_norm else []
    parts += [f"norm of v {mixer.v_norm_epsilon:g}"] if mixer.v_norm_epsilon else []
    parts += ["v is k"] if mixer.values_are_keys else []
    return parts + [name for name in ("qkv_bias", "o_bias", "output_gate", "sinks") if getattr(mixer, name)]


@pytest.mark.parametrize("path", [path for path in FILES if "is" in read(path)], ids=lambda path: path.stem)
def test_a_published_model_is_read_as_what_it_is(path) -> None:
    data = read(path)
    model = ModelConfig.from_dict(data["config"], default_dtype=data.get("stored_dtype"))
    assert in_words(model) == data["is"]
    assert ModelConfig.from_description(json.loads(json.dumps(model.to_description()))) == model


@pytest.mark.parametrize("path", [path for path in FILES if "refused" in read(path)], ids=lambda path: path.stem)
def test_a_published_model_that_is_not_computed_is_refused_by_a_field(path) -> None:
    data = read(path)
    with pytest.raises(ConfigError) as raised:
        ModelConfig.from_dict(data["config"])
    message = str(raised.value)
    assert message.startswith(data["refused"])
    assert data["config"]["model_type"] in message
    assert len(message) < 300
    assert not set("{[").intersection(message), "no value is dumped"


def test_both_features_of_deepseek_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"has a mixture of experts \(MoE\) and has multi-head latent attention \(MLA\), which are not supported"
    ):
        ModelConfig.from_dict(read(ROOT / "tests" / "model" / "published" / "deepseek-v2-lite.json")["config"])


@pytest.mark.parametrize(
    ("text_config", "way_out"),
    [
        ({"model_type": "gemma3_text"}, "cannot be opened from this checkpoint yet"),
        ({"model_type": "unknown"}, "There is no way around that yet"),
        (None, "There is no way around that yet"),
    ],
)
def test_a_vision_model_is_refused_with_the_way_out(text_config, way_out) -> None:
    config = {"model_type": "any", "vision_config": {"depth": 2}, "text_config": text_config}
    with pytest.raises(ConfigError, match=rf"^vision_config: this model \(model_type any\) is a vision model, which .*{way_out}"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    "value", ["x" * 10_000, "a\nb", {"a": ["b"] * 999}, ["c"] * 9999, 10**5000], ids=str.split("long newline object list huge")
)
def test_no_value_makes_a_refusal_long(value) -> None:
    for config in ({"model_type": value, "num_experts": 8}, {"model_type": "m", "architectures": [value], "num_experts": 8}):
        with pytest.raises(ConfigError) as raised:
            ModelConfig.from_dict(config)
        assert len(str(raised.value)) < 300
        assert "\n" not in str(raised.value)


def test_there_are_published_models_of_every_family() -> None:
    read_ones = [read(path)["config"]["model_type"] for path in FILES if "is" in read(path)]
    assert set(read_ones) == set(FAMILIES) - {"gemma4_text", "gemma4_unified_text"}  # which are published with towers only
    assert len(FILES) >= 30


def test_a_hundred_published_models_open() -> None:
    assert sum("is" in read(path) for path in FILES) >= 100
