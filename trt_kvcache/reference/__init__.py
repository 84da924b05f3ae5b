"""The reference engine: the decoder in NumPy, over the same bound memory as a TensorRT engine."""

from trt_kvcache.reference.engine import ReferenceEngine
from trt_kvcache.reference.model import Attention

__all__ = ["Attention", "ReferenceEngine"]
