"""Qwen3.5: its text decoder with a vision tower, which is left out."""

from trt_kvcache.model.families import qwen3_5_text
from trt_kvcache.model.families.towers import QWEN_NAMES, QWEN_TOWERS, with_tower

FAMILY = with_tower(
    qwen3_5_text.FAMILY,
    name="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    title="Qwen3.5 (vision)",
    renamed=QWEN_NAMES,
    towers=QWEN_TOWERS,
)
