"""Llama: pre-norm RMSNorm, grouped-query attention, a gated MLP with SiLU."""

from trt_kvcache._util.caller_warning import warn_caller
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    _warn_of_window(fields)
    full_attention_only(fields)
    bias = fields.flag("attention_bias", False)
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias)
    layer = pre_norm_layer(fields, mixer, mlp(fields, bias=fields.flag("mlp_bias", False)))
    return model(fields, "llama", [layer] * num_layers(fields))


def _warn_of_window(fields: ConfigFields) -> None:
    """Warn of a sliding window in the file: Llama's attention has none, and transformers ignores the field too."""
    window = fields.get("sliding_window")
    is_on = fields.flag("use_sliding_window", True) and isinstance(window, int)
    if is_on and 0 < window < fields.integer("max_position_embeddings"):
        warn_caller(f"sliding_window: Llama has no sliding window; the one of {window} tokens is ignored.", UserWarning)


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    title="Llama",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
)
