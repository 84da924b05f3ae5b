"""Qwen3-Next: gated delta nets in most layers, attention with an output gate in the others. Beside the experts is a gated shared one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, Mlp, mlps, num_experts, router, sparse_layers
from trt_kvcache.model.families.family import DRAFT_HEADS, EXPERT_NAMES, LLAMA_NAMES, STACKED_EXPERTS, Family
from trt_kvcache.model.families.fields import (
    FULL,
    attention,
    layer_types,
    mlp,
    model,
    norm,
    num_layers,
    pre_norm_layer,
    rope,
    silu_convolution,
)
from trt_kvcache.model.layer_config import Mixer, QkNormConfig
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig

LINEAR = "linear_attention"

#: Defaults of the fields about experts.
EXPERT_DEFAULTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    count = num_experts(fields, 512)
    of_layers = mlps(sparse_layers(fields, count), lambda: experts(fields, count, fields.flag("norm_topk_prob", True)), lambda: mlp(fields))
    return read_hybrid(fields, "qwen3_next", of_layers)


def experts(fields: ConfigFields, count: int, renormalise: bool) -> RoutedMlpConfig:
    """Return the experts of a layer, and the shared one."""
    return RoutedMlpConfig(
        router=router(fields, count, renormalise=renormalise),
        expert=mlp(fields, size_field="moe_intermediate_size"),
        shared=mlp(fields, size_field="shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_hybrid(fields: ConfigFields, family: str, of_layers: Sequence[Mlp], *, rope_fields: tuple[str, ...] = ()) -> ModelConfig:
    """Return a model of gated delta nets and attention with an output gate. ``rope_fields``: RoPE fields without effect on text.

    ``of_layers``: the MLP of each layer.
    """
    norms = norm(fields, weight_offset=1.0, rounds_before_weight=False)
    interval = fields.integer("full_attention_interval")
    default = [LINEAR if (index + 1) % interval else FULL for index in range(num_layers(fields))]
    kinds = layer_types(fields, default, known=(FULL, LINEAR))
    mixers: dict[str, Mixer] = {}
    if LINEAR in kinds:
        mixers[LINEAR] = _delta_net(fields)
    if FULL in kinds:
        bias = fields.flag("attention_bias", False)
        parts = {"qkv_bias": bias, "o_bias": bias, "qk_norm": QkNormConfig(norm=norms)}
        rotation = rope(fields, may_be_partial=True, other_fields=rope_fields)
        mixers[FULL] = attention(fields, rope=rotation, output_gate=True, **parts)
    layers = [pre_norm_layer(fields, mixers[kind], one, before=norms) for kind, one in zip(kinds, of_layers, strict=True)]
    return model(fields, family, layers, final_norm=norms)


def read_mtp(fields: ConfigFields) -> ModelConfig:
    """Return the MTP head: a model of one attention layer, with experts."""
    return mtp_head(fields, read, "num_nextn_predict_layers")


def mtp_head(fields: ConfigFields, read_model: Callable[[ConfigFields], ModelConfig], count_field: str) -> ModelConfig:
    """Return an MTP head of one attention layer, whose MLP is that of the first layer of the model."""
    # As in vLLM (qwen3_next_mtp.py and qwen3_5_mtp.py in vllm/model_executor/models) and SGLang (python/sglang/srt/models/qwen3_5_mtp.py):
    # `mtp.fc` of the norm of the embedding, first, and of the norm of the hidden state after the final norm of the model; all norms with
    # 1 + weight.
    if fields.count(count_field, 1) != 1:
        raise fields.refusal(count_field, "1, an MTP head of one layer")
    head = read_model(ConfigFields({**fields.data, "num_hidden_layers": 1, "layer_types": [FULL]}))
    return replace(head, merge_norm=head.final_norm)


def _delta_net(fields: ConfigFields) -> GatedDeltaNetConfig:
    """Return the gated delta net of all layers."""
    silu_convolution(fields)
    return GatedDeltaNetConfig(
        num_key_heads=fields.integer("linear_num_key_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
        norm=norm(fields),
    )


FAMILY = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    title="Qwen3-Next",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        **EXPERT_DEFAULTS,
    },
    read=read,
    read_mtp=read_mtp,
    names={
        **LLAMA_NAMES,
        **EXPERT_NAMES,
        "shared_gate": "mlp.shared_expert.gate_proj",
        "shared_up": "mlp.shared_expert.up_proj",
        "shared_down": "mlp.shared_expert.down_proj",
        "shared_expert_gate": "mlp.shared_expert_gate",
        "output_gate": "self_attn.q_proj",
        "delta_qkv": "linear_attn.in_proj_qkvz",
        "delta_z": "linear_attn.in_proj_qkvz",
        "delta_b": "linear_attn.in_proj_ba",
        "delta_a": "linear_attn.in_proj_ba",
        "conv": "linear_attn.conv1d",
        "dt_bias": "linear_attn.dt_bias",
        "a_log": "linear_attn.A_log",
        "delta_norm": "linear_attn.norm",
        "delta_out": "linear_attn.out_proj",
    },
    head_by_head=frozenset({"self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"}),
    ignored=(DRAFT_HEADS,),
    stacked=STACKED_EXPERTS,
    uses=frozenset(NUM_EXPERTS),
)
