"""Guided decoding: grammars are compiled, and masks of tokens computed, in processes of their own."""

from trt_kvcache.server.guidance.guidance import Guidance, GuidedMask
from trt_kvcache.server.guidance.options import GuidanceOptions

__all__ = ["Guidance", "GuidanceOptions", "GuidedMask"]
