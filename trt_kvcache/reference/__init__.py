"""The reference engine: the decoder in NumPy, over the same bound memory as a TensorRT engine."""

from trt_kvcache.reference.attention import Attention
from trt_kvcache.reference.engine import ReferenceEngine

__all__ = ["Attention", "ReferenceEngine"]
