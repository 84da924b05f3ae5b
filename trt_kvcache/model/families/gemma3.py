"""Gemma 3 from 4B on: the text decoder of Gemma 3 with a vision tower, which is left out."""

from dataclasses import replace

from trt_kvcache.model.families import gemma3_text
from trt_kvcache.model.families.towers import LLAVA_NAMES, LLAVA_TOWERS, with_tower

FAMILY = with_tower(
    replace(gemma3_text.FAMILY, uses=frozenset()),  # its model in transformers does not cap logits, so a soft cap would be ambiguous
    name="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    title="Gemma 3 (vision)",
    renamed=LLAVA_NAMES,
    towers=LLAVA_TOWERS,
)
