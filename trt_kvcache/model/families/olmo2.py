"""OLMo 2: post-norms instead of pre-norms, and norms over all heads of q and of k."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, norm, num_layers, rope
from trt_kvcache.model.layer_config import LayerConfig, QkNormConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    bias = fields.flag("attention_bias", False)
    rounded_last = norm(fields, rounds_before_weight=False)
    qk_norm = QkNormConfig(norm=rounded_last, over="full")
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    layer = LayerConfig(mixer=mixer, mlp=mlp(fields), mixer_output_norm=rounded_last, mlp_output_norm=rounded_last)
    return model(fields, "olmo2", [layer] * num_layers(fields), final_norm=rounded_last)


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
