"""Guided decoding: worker processes compile grammars and compute token masks."""

from trt_kvcache.server.guidance.guidance import Guidance, GuidedMask
from trt_kvcache.server.guidance.guidance_options import GuidanceOptions

__all__ = ["Guidance", "GuidanceOptions", "GuidedMask"]
