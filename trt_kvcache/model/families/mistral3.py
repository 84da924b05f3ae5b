"""Mistral Small 3.1 and later, Ministral 3 and Devstral 2: Mistral or Ministral 3 with a vision tower, which is left out."""

from trt_kvcache.model.families import ministral3, mistral
from trt_kvcache.model.families.towers import LLAVA_NAMES, LLAVA_TOWERS, with_tower

FAMILY = with_tower(
    mistral.FAMILY,
    ministral3.FAMILY,
    name="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    title="Mistral Small 3, Ministral 3 (vision)",
    renamed=LLAVA_NAMES,
    towers=LLAVA_TOWERS,
)
