"""Granite: Llama with multipliers of the embedding, the attention scores, the residual stream and the logits."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    bias = fields.flag("attention_bias", False)
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias, scale=fields.number("attention_multiplier"))
    layer = pre_norm_layer(
        fields, mixer, mlp(fields, bias=fields.flag("mlp_bias", False)), residual_multiplier=fields.number("residual_multiplier")
    )
    return model(
        fields,
        "granite",
        [layer] * num_layers(fields),
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_divisor=fields.number("logits_scaling"),
    )


FAMILY = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    title="Granite",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
)
