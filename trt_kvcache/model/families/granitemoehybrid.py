"""Granite 4 hybrids: Granite with Mamba-2 in most layers. An MLP is a shared expert, alone or with other experts."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import granite
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, num_experts, router
from trt_kvcache.model.families.family import LLAMA_NAMES, MAMBA_NAMES, ExpertStack, Family
from trt_kvcache.model.families.fields import FULL, attention, layer_types, mamba2, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import AttentionConfig, Mixer
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig

_MOE = "block_sparse_moe"

#: Layer types by name; older files have other names.
_MAMBA, _ATTENTION = ("linear_attention", "mamba"), (FULL, "attention")


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    kinds = layer_types(fields, _MAMBA[:1] * num_layers(fields), known=_MAMBA + _ATTENTION)
    mixers: dict[bool, Mixer] = {}
    if not set(kinds).isdisjoint(_MAMBA):
        mixers[False] = mamba2(fields)
    if not set(kinds).isdisjoint(_ATTENTION):
        mixers[True] = _attention(fields)
    feed_forward, multiplier = _mlp(fields), fields.number("residual_multiplier")
    return model(
        fields,
        "granitemoehybrid",
        [pre_norm_layer(fields, mixers[kind in _ATTENTION], feed_forward, residual_multiplier=multiplier) for kind in kinds],
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_divisor=fields.number("logits_scaling"),
    )


def _mlp(fields: ConfigFields) -> MlpConfig | RoutedMlpConfig:
    """Return the MLP of all layers. Without experts, the shared one is an MLP like any other."""
    experts, shared = num_experts(fields, 8), mlp(fields, size_field="shared_intermediate_size")
    if not experts:
        return shared
    return RoutedMlpConfig(router=router(fields, experts, renormalise=True), expert=mlp(fields), shared=shared)


def _attention(fields: ConfigFields) -> AttentionConfig:
    """Return the attention, without RoPE unless the file asks for it."""
    kind, bias = fields.get("position_embedding_type"), fields.flag("attention_bias", False)
    if kind not in (None, "nope", "rope"):
        raise fields.refusal("position_embedding_type", "rope, nope or null")
    return attention(
        fields,
        rope=rope(fields) if kind == "rope" else None,
        qkv_bias=bias,
        o_bias=bias,
        scale=fields.number("attention_multiplier"),
    )


FAMILY = Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    title="Granite 4 (hybrid)",
    defaults={
        **granite.FAMILY.defaults,
        "intermediate_size": 11008,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    read=read,
    names={
        **LLAMA_NAMES,
        **MAMBA_NAMES,
        "gate": "shared_mlp.input_linear",
        "up": "shared_mlp.input_linear",
        "down": "shared_mlp.output_linear",
        "shared_gate": "shared_mlp.input_linear",
        "shared_up": "shared_mlp.input_linear",
        "shared_down": "shared_mlp.output_linear",
        "router": f"{_MOE}.router.layer",
        **{f"expert_{name}": f"{_MOE}.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")},
    },
    stacked={
        f"{_MOE}.input_linear.weight": ExpertStack(roles=("expert_gate", "expert_up")),
        f"{_MOE}.output_linear.weight": ExpertStack(roles=("expert_down",)),
        f"{_MOE}.experts.gate_up_proj": ExpertStack(roles=("expert_gate", "expert_up")),
        f"{_MOE}.experts.down_proj": ExpertStack(roles=("expert_down",)),
    },
    renamed_in_layers={f"{_MOE}.router.weight": f"{_MOE}.router.layer.weight"},
    uses=frozenset(NUM_EXPERTS),
)
