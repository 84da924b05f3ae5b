"""Gemma 4, text decoder: larger heads in full attention, where K may be V too, an RMSNorm of v, a learned scale of each layer, shared
K/V (the last layers read K and V of earlier ones), per-layer embeddings, and experts next to a dense MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import num_experts, router
from trt_kvcache.model.families.family import ExpertStack, Family
from trt_kvcache.model.families.fields import FULL, SLIDING, layer_types, mlp, model, norm, num_layers, softcap
from trt_kvcache.model.families.gemma2 import GEMMA_NAMES, window
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, QkNormConfig
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.per_layer_config import PerLayerEmbeddingConfig, PerLayerInputConfig
from trt_kvcache.model.rope import RopeConfig

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
#: Fields of other families for RoPE, which this one has in ``rope_parameters``.
_OTHER_ROPE_FIELDS = ("rope_theta", "rope_scaling", "partial_rotary_factor")


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise fields.refusal("use_bidirectional_attention", "null or vision, which is causal attention in a text")
    kinds = _layer_types(fields)
    sources = _kv_sources(fields, kinds)
    found, sizes, bias = norm(fields, rounds_before_weight=False), _sizes(fields, kinds), fields.flag("attention_bias", False)
    mixers = {
        kind: AttentionConfig(
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=sizes[kind]["num_kv_heads"],
            head_dim=sizes[kind]["head_dim"],
            rope=_rope(fields, kind),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=QkNormConfig(norm=found),
            v_norm_epsilon=found.epsilon,
            values_are_keys=kind == FULL and fields.flag("attention_k_eq_v", False),
            scale=1.0,
            window=window(fields, kind),
        )
        for kind in dict.fromkeys(kinds)
    }
    norms: dict[str, Any] = dict.fromkeys(("input_norm", "mixer_output_norm", "mlp_output_norm"), found)
    dense = mlp(fields, activation_field="hidden_activation")
    wide = replace(dense, intermediate_size=2 * dense.intermediate_size) if fields.flag("use_double_wide_mlp", False) else dense
    embedding = _per_layer_embedding(fields, found)
    per_layer = None if embedding is None else PerLayerInputConfig(size=embedding.size, activation=str(dense.activation), output_norm=found)
    common = {"per_layer_input": per_layer, "output_scale": True, **norms}
    layers = [
        LayerConfig(mixer=mixers[kind], **_mlp(fields, dense, found), **common)
        if source is None
        else LayerConfig(mixer=kv_reader(mixers[kind], source), **_mlp(fields, wide, found), **common)
        for kind, source in zip(kinds, sources, strict=True)
    ]
    return model(
        fields,
        str(fields.get("model_type")),
        layers,
        final_norm=found,
        embedding_multiplier=math.sqrt(fields.integer("hidden_size")),
        rounds_embedding_multiplier=True,
        final_softcap=softcap(fields, "final_logit_softcapping"),
        per_layer_embedding=embedding,
    )


def _mlp(fields: ConfigFields, dense: MlpConfig, norm: NormConfig) -> dict[str, Any]:
    """Return the MLP of a layer and the norm of its input, as fields of ``LayerConfig``: a dense MLP alone, or next to experts."""
    if not fields.flag("enable_moe_block", False):
        return {"mlp": dense, "mlp_norm": norm}
    choice = router(
        fields,
        num_experts(fields, 0, ("num_experts",)),
        per_token_field="top_k_experts",
        renormalise=True,
        norm_epsilon=norm.epsilon,
        expert_scale=True,
    )
    expert = replace(dense, intermediate_size=fields.integer("moe_intermediate_size"))
    return {"mlp": RoutedMlpConfig(router=choice, expert=expert, shared=dense, branch_norm=norm)}


def _layer_types(fields: ConfigFields) -> tuple[str, ...]:
    """Return the type of each layer. The last one has full attention: transformers changes files that say otherwise."""
    count = num_layers(fields)
    kinds = layer_types(fields, [FULL if (layer + 1) % 6 == 0 or layer + 1 == count else SLIDING for layer in range(count)])
    if kinds[-1] != FULL:
        raise ConfigError(f"layer_types: expected {FULL} for the last layer, got {kinds[-1]}.")
    return kinds


def _per_layer_embedding(fields: ConfigFields, norm: NormConfig) -> PerLayerEmbeddingConfig | None:
    """Return the per-layer embedding; None if its size is 0 or null."""
    size = 0 if fields.get("hidden_size_per_layer_input") is None else fields.count("hidden_size_per_layer_input", 0)
    if size == 0:
        return None
    if size < 0:
        raise fields.refusal("hidden_size_per_layer_input", "an integer >= 0")
    vocab_size = fields.integer("vocab_size_per_layer_input")
    if vocab_size < fields.integer("vocab_size"):
        raise fields.refusal("vocab_size_per_layer_input", f"at least vocab_size={fields.integer('vocab_size')}, a row of each token")
    return PerLayerEmbeddingConfig(vocab_size=vocab_size, size=size, norm=norm)


def _kv_sources(fields: ConfigFields, kinds: tuple[str, ...]) -> list[int | None]:
    """Return for each layer the one whose K and V it reads: for the last layers, the last one of its type before them all; else None."""
    shared = fields.count("num_kv_shared_layers", 0)
    if not 0 <= shared < len(kinds):
        raise fields.refusal("num_kv_shared_layers", f"an integer from 0 to {len(kinds) - 1}")
    first = len(kinds) - shared
    stored = {kind: layer for layer, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in stored:
            raise fields.refusal("num_kv_shared_layers", f"a number that leaves a layer of {kind} with K and V of its own")
    return [None] * first + [stored[kind] for kind in kinds[first:]]


def kv_reader(mixer: AttentionConfig, source: int) -> AttentionConfig:
    """Return the attention of a layer that reads K and V of another one."""
    return replace(mixer, kv_source_layer=source, v_norm_epsilon=None, values_are_keys=False)


def _sizes(fields: ConfigFields, kinds: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Return ``head_dim`` and ``num_kv_heads`` of each type of layers."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    common = {ours: fields.integer(name) for name, ours in names.items()}
    if "per_layer_config" not in fields:
        full = {**common, "head_dim": fields.integer("global_head_dim")}
        if fields.flag("attention_k_eq_v", False) and "num_global_key_value_heads" in fields:
            full["num_kv_heads"] = fields.integer("num_global_key_value_heads")
        return {SLIDING: common, FULL: full}
    given = fields.get("per_layer_config")
    if not isinstance(given, Mapping) or not set(given) <= {str(layer) for layer in range(len(kinds))}:
        raise fields.refusal("per_layer_config", "an object whose names are indices of layers")
    found: dict[str, dict[str, int]] = {}
    for layer, kind in enumerate(kinds):
        place, own = f"per_layer_config.{layer}", given.get(str(layer), {})
        if not isinstance(own, Mapping) or not set(own) <= set(names):
            raise ConfigError(f"{place}: expected an object of {' and '.join(names)}, got {short_repr(own)}.")
        numbers = ConfigFields(own, f"{place}.")
        sizes = {ours: numbers.integer(name, common[ours]) for name, ours in names.items()}
        if found.setdefault(kind, sizes) != sizes:
            raise ConfigError(f"{place}: expected the sizes of the other layers of {kind}, {found[kind]}, got {sizes}.")
    return found


def _rope(fields: ConfigFields, kind: str) -> RopeConfig:
    """Return the RoPE of a type of layers."""
    for name in _OTHER_ROPE_FIELDS:
        if name in fields:
            raise fields.refusal(name, "nothing, since rope_parameters has it for each type of layers")
    given = fields.get("rope_parameters") or _ROPES
    if not isinstance(given, Mapping) or not set(given) <= set(_ROPES) or not isinstance(given.get(kind), Mapping):
        raise fields.refusal("rope_parameters", f"one object for {FULL} and one for {SLIDING}")
    ConfigFields(given[kind], f"rope_parameters.{kind}.").number("rope_theta")
    return RopeConfig.from_dict({"rope_parameters": given[kind]}, max_position_embeddings=fields.integer("max_position_embeddings"))


FAMILY = Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    title="Gemma 4",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    read=read,
    names={
        **GEMMA_NAMES,
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_projection": "per_layer_projection",
        "per_layer_norm": "post_per_layer_input_norm",
        "output_scale": "layer_scalar",
        "router": "router.proj",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "expert_gate": "experts.{expert}.gate_proj",
        "expert_up": "experts.{expert}.up_proj",
        "expert_down": "experts.{expert}.down_proj",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_output_norm": "post_feedforward_layernorm_2",
        "shared_gate": GEMMA_NAMES["gate"],
        "shared_up": GEMMA_NAMES["up"],
        "shared_down": GEMMA_NAMES["down"],
        "shared_norm": GEMMA_NAMES["mlp_norm"],
        "shared_output_norm": "post_feedforward_layernorm_1",
    },
    stacked={
        "experts.gate_up_proj": ExpertStack(roles=("expert_gate", "expert_up")),
        "experts.down_proj": ExpertStack(roles=("expert_down",)),
    },
    uses=frozenset({"final_logit_softcapping", "use_bidirectional_attention", "num_experts"}),
)
