"""Qwen2.5-VL: Qwen2 with a vision tower, which is left out. Its M-RoPE is RoPE for a text; older files have no ``text_config``."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import IMAGE_AXES
from trt_kvcache.model.families.towers import QWEN_NAMES, QWEN_TOWERS, with_tower
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``text_config``, or of the fields in its place."""
    return qwen2.read_with(fields, "qwen2_5_vl", other_fields=IMAGE_AXES, other_kinds={"mrope": "default"})


TEXT = Family(
    name="qwen2_5_vl_text",
    architecture="Qwen2_5_VLTextModel",
    title="Qwen2.5-VL (text)",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "max_window_layers": 80,
        "rope_theta": 1e6,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    read=read,
)

FAMILY = with_tower(
    TEXT,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VLForConditionalGeneration",
    title="Qwen2.5-VL (vision)",
    renamed=QWEN_NAMES,
    towers=(*QWEN_TOWERS, "visual."),
    may_be_flat=True,
)
