"""Qwen3: Qwen2 with norms of q and k per head, and biases of q, k, v and o only with ``attention_bias``."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, norm, pre_norm_layer, rope, windows_from_layer
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    bias = fields.flag("attention_bias", False)
    parts = {"rope": rope(fields), "qkv_bias": bias, "o_bias": bias, "qk_norm": QkNormConfig(norm=norm(fields))}
    layers = [pre_norm_layer(fields, attention(fields, window=window, **parts), mlp(fields)) for window in windows_from_layer(fields)]
    return model(fields, "qwen3", layers)


FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    title="Qwen3",
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
    read=read,
)
