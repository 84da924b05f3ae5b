"""gpt-oss: attention sinks, a sliding window in every other layer, and in all layers experts with biases and clamped SwiGLU."""

from __future__ import annotations

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, num_experts, router
from trt_kvcache.model.families.family import EXPERT_NAMES, LLAMA_NAMES, ExpertStack, Family
from trt_kvcache.model.families.fields import (
    FULL,
    SLIDING,
    attention,
    layer_types,
    model,
    norm,
    num_layers,
    pre_norm_layer,
    rope as rope_of_all,
    window_of_layer_type,
)
from trt_kvcache.model.mlp_config import ClampedSwiGLU, MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.rope import RopeConfig

_EXPERTS = "mlp.experts"
_GATE_UP, _DOWN = ("expert_gate", "expert_up"), ("expert_down",)

#: RoPE of files that have neither of its objects, as in transformers.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    kinds = layer_types(fields, [FULL if layer % 2 else SLIDING for layer in range(num_layers(fields))])
    bias, turns, norms = fields.flag("attention_bias", True), rope(fields), norm(fields, rounds_before_weight=False)
    mixers = {
        kind: attention(fields, rope=turns, qkv_bias=bias, o_bias=bias, sinks=True, window=window_of_layer_type(fields, kind))
        for kind in set(kinds)
    }
    routed = experts(fields)
    layers = [pre_norm_layer(fields, mixers[kind], routed, before=norms) for kind in kinds]
    return model(fields, "gpt_oss", layers, final_norm=norms)


def rope(fields: ConfigFields) -> RopeConfig:
    """Return the RoPE of all layers: YaRN, unless the file says otherwise."""
    objects = [name for name in ("rope_parameters", "rope_scaling") if name in fields]
    for name in objects:
        if not fields.get(name):
            raise fields.refusal(name, "an object with a rope_type, or null")
    found = rope_of_all(fields if objects else ConfigFields({**fields.data, "rope_parameters": _YARN}))
    original = found.original_max_position_embeddings
    if found.kind == "yarn" and fields.integer("initial_context_length", original) != original:
        raise fields.refusal("initial_context_length", f"{original}, the original context of YaRN")
    return found


def experts(fields: ConfigFields) -> RoutedMlpConfig:
    """Return the MLP of all layers. Softmax of the chosen logits alone is softmax of all, divided by the sum of the chosen scores."""
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.refusal("hidden_act", "silu, whose clamped variant the experts have")
    activation = ClampedSwiGLU(alpha=fields.number("swiglu_alpha"), limit=fields.number("swiglu_limit"))
    expert = MlpConfig(intermediate_size=fields.integer("intermediate_size"), activation=activation, bias=True)
    choice = router(fields, num_experts(fields, 128), renormalise=True, bias=True)
    if fields.integer("experts_per_token", choice.experts_per_token) != choice.experts_per_token:
        raise fields.refusal("experts_per_token", f"{choice.experts_per_token}, as num_experts_per_tok says")
    return RoutedMlpConfig(router=choice, expert=expert)


FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    title="gpt-oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "hidden_act": "silu",
        "intermediate_size": 2880,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    read=read,
    names={**LLAMA_NAMES, **EXPERT_NAMES, "router": "mlp.router", "sinks": "self_attn.sinks"},
    stacked={
        f"{_EXPERTS}.gate_up_proj": ExpertStack(roles=_GATE_UP, is_interleaved=True, is_transposed=True),
        f"{_EXPERTS}.down_proj": ExpertStack(roles=_DOWN, is_transposed=True),
        f"{_EXPERTS}.gate_up_proj_bias": ExpertStack(roles=_GATE_UP, suffix=".bias", is_interleaved=True),
        f"{_EXPERTS}.down_proj_bias": ExpertStack(roles=_DOWN, suffix=".bias"),
        **{
            f"{_EXPERTS}.gate_up_proj{part}": ExpertStack(roles=_GATE_UP, part=part, is_interleaved=True) for part in ("_blocks", "_scales")
        },
        **{f"{_EXPERTS}.down_proj{part}": ExpertStack(roles=_DOWN, part=part) for part in ("_blocks", "_scales")},
    },
    uses=frozenset(NUM_EXPERTS),
)
