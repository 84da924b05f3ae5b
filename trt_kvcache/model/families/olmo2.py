"""OLMo 2: post-norms instead of pre-norms, and norms over all heads of q and of k."""

from typing import Any

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, norm, num_layers, rope
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig, QkNormConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    return olmo(fields, "olmo2", [olmo_attention(fields, rope=rope(fields))] * num_layers(fields))


def olmo_norm(fields: ConfigFields) -> NormConfig:
    """Return RMSNorm with the weight in float32."""
    return norm(fields, rounds_before_weight=False)


def olmo_attention(fields: ConfigFields, **options: Any) -> AttentionConfig:
    """Return attention with norms over all heads."""
    bias = fields.flag("attention_bias", False)
    return attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=QkNormConfig(norm=olmo_norm(fields), over="full"), **options)


def olmo(fields: ConfigFields, family: str, mixers: list[AttentionConfig]) -> ModelConfig:
    """Return a model with these mixers and the other parts of OLMo 2."""
    found, shared = olmo_norm(fields), mlp(fields)
    layers = [LayerConfig(mixer=mixer, mlp=shared, mixer_output_norm=found, mlp_output_norm=found) for mixer in mixers]
    return model(fields, family, layers, final_norm=found)


FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    title="OLMo 2",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 50279,
    },
    read=read,
    names={
        **LLAMA_NAMES,
        "mixer_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
)
