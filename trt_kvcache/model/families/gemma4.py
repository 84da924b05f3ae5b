"""Gemma 4 with vision and audio towers, as it is published: the text decoder alone."""

from dataclasses import replace

from trt_kvcache.model.families import gemma4_text
from trt_kvcache.model.families.towers import LLAVA_NAMES, with_tower

#: Prefixes of the towers, and of the projections of their outputs to rows.
TOWERS = tuple(f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"))

_FAMILY = with_tower(
    gemma4_text.FAMILY,
    name="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    title="Gemma 4 (vision, audio)",
    renamed=LLAVA_NAMES,
    towers=TOWERS,
    images_need="bidirectional attention inside an image, or per-layer embeddings of token ids",
)

FAMILY = replace(_FAMILY, uses=_FAMILY.uses | {"audio_config"})
