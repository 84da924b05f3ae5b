"""Qwen3-VL: Qwen3 without windows, with a vision tower, which is left out. Its M-RoPE is RoPE for a text."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen3
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import (
    IMAGE_AXES,
    attention,
    full_attention_only,
    mlp,
    model,
    norm,
    num_layers,
    pre_norm_layer,
    rope,
)
from trt_kvcache.model.families.towers import QWEN_NAMES, QWEN_TOWERS, with_tower
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``text_config``."""
    full_attention_only(fields)
    if fields.flag("use_sliding_window", False):
        raise fields.refusal("use_sliding_window", "false")
    bias = fields.flag("attention_bias", False)
    found = rope(fields, other_fields=IMAGE_AXES)
    mixer = attention(fields, rope=found, qkv_bias=bias, o_bias=bias, qk_norm=QkNormConfig(norm=norm(fields)))
    return model(fields, "qwen3_vl", [pre_norm_layer(fields, mixer, mlp(fields))] * num_layers(fields))


TEXT = Family(
    name="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    title="Qwen3-VL (text)",
    defaults={**qwen3.FAMILY.defaults, "max_position_embeddings": 128000, "rope_theta": 500000.0},
    read=read,
)

FAMILY = with_tower(
    TEXT,
    name="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    title="Qwen3-VL (vision)",
    renamed=QWEN_NAMES,
    towers=QWEN_TOWERS,
)
