"""Qwen3.5-MoE: its text decoder with a vision tower, which is left out."""

from trt_kvcache.model.families import qwen3_5_moe_text
from trt_kvcache.model.families.towers import QWEN_NAMES, QWEN_TOWERS, with_tower

FAMILY = with_tower(
    qwen3_5_moe_text.FAMILY,
    name="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    title="Qwen3.5-MoE (vision)",
    renamed=QWEN_NAMES,
    towers=QWEN_TOWERS,
    images_need="positions of three axes",
)
