"""GLM-4 of April 2025: sandwich norms, interleaved RoPE of half a head, and one tensor of the MLP's gate and up projection."""

from dataclasses import replace

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, norm, num_layers, rope
from trt_kvcache.model.layer_config import LayerConfig
from trt_kvcache.model.model_config import ModelConfig

#: Tokens that end a sequence if the file names none, or null.
_END_TOKENS = (151329, 151336, 151338)


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    norms = norm(fields)
    mixer = attention(fields, rope=rope(fields, may_be_partial=True), qkv_bias=fields.flag("attention_bias", True))
    layer = LayerConfig(mixer=mixer, mlp=mlp(fields), input_norm=norms, mixer_output_norm=norms, mlp_norm=norms, mlp_output_norm=norms)
    found = model(fields, "glm4", [layer] * num_layers(fields))
    return found if "eos_token_id" in fields else replace(found, eos_token_ids=_END_TOKENS)


FAMILY = Family(
    name="glm4",
    architecture="Glm4ForCausalLM",
    title="GLM-4 (0414)",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 0.00000015625,
        "hidden_act": "silu",
        "attention_bias": True,
    },
    read=read,
    names={
        **LLAMA_NAMES,
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        "mixer_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    },
    interleaved_rope=True,
)
