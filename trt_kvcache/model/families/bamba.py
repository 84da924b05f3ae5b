"""Bamba: Mamba-2 in most layers, attention with partial RoPE (half of each head) in the others."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import BAMBA_NAMES, Family
from trt_kvcache.model.families.fields import attention, layer_indices, mamba2, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import Mixer
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    indices = layer_indices(fields, "attn_layer_indices") or ()
    attends = [index in indices for index in range(num_layers(fields))]
    feed_forward = mlp(fields, bias=fields.flag("mlp_bias", False))
    mixers: dict[bool, Mixer] = {}
    if False in attends:
        mixers[False] = mamba2(fields)
    if True in attends:
        bias = fields.flag("attention_bias", False)
        half = rope(ConfigFields({**fields.data, "partial_rotary_factor": 0.5}), may_be_partial=True)
        mixers[True] = attention(fields, rope=half, qkv_bias=bias, o_bias=bias)
    return model(fields, "bamba", [pre_norm_layer(fields, mixers[attends_here], feed_forward) for attends_here in attends])


FAMILY = Family(
    name="bamba",
    architecture="BambaForCausalLM",
    title="Bamba",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    final_norm="model.final_layernorm.weight",
    names=BAMBA_NAMES,
)
