"""Gemma 4 12B as it is published, with projections of images and sounds: the text decoder alone."""

from dataclasses import replace

from trt_kvcache.model.families import gemma4_unified_text
from trt_kvcache.model.families.gemma4 import TOWERS
from trt_kvcache.model.families.towers import LLAVA_NAMES, with_tower

_FAMILY = with_tower(
    gemma4_unified_text.FAMILY,
    name="gemma4_unified",
    architecture="Gemma4UnifiedForConditionalGeneration",
    title="Gemma 4 unified (vision, audio)",
    renamed=LLAVA_NAMES,
    towers=(*TOWERS, "vision_embedder.", "model.vision_embedder."),
    images_need="bidirectional attention inside an image",
)

FAMILY = replace(_FAMILY, uses=_FAMILY.uses | {"audio_config"})
