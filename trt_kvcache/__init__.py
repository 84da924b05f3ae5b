"""The KV cache layer for TensorRT, in Python.

Importing this package needs NumPy and ml_dtypes only. Names that need more (CUDA, Hugging Face folders, sessions) are
imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trt_kvcache._version import __version__
from trt_kvcache.config import CacheConfig, KVCacheConfig, KVLayerConfig
from trt_kvcache.estimate import estimate_memory, largest_batch, longest_sequence
from trt_kvcache.layout import KVLayout
from trt_kvcache.lengths import Lengths
from trt_kvcache.linear import LinearKVCache
from trt_kvcache.manager import KVCacheManager
from trt_kvcache.memory import HostMemory
from trt_kvcache.tensor import DeviceTensor

if TYPE_CHECKING:
    from trt_kvcache.bindings import BindingPlan
    from trt_kvcache.builder import build_engine
    from trt_kvcache.cuda_memory import CudaMemory
    from trt_kvcache.names import TensorNames
    from trt_kvcache.sampling import SamplingParams
    from trt_kvcache.session import InferenceSession

_LAZY = {
    "BindingPlan": "bindings",
    "CudaMemory": "cuda_memory",
    "InferenceSession": "session",
    "SamplingParams": "sampling",
    "TensorNames": "names",
    "build_engine": "builder",
}

__all__ = [
    "BindingPlan",
    "CacheConfig",
    "CudaMemory",
    "DeviceTensor",
    "HostMemory",
    "InferenceSession",
    "KVCacheConfig",
    "KVCacheManager",
    "KVLayerConfig",
    "KVLayout",
    "Lengths",
    "LinearKVCache",
    "SamplingParams",
    "TensorNames",
    "__version__",
    "build_engine",
    "estimate_memory",
    "largest_batch",
    "longest_sequence",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trt_kvcache' has no attribute {name!r}")
    return getattr(import_module(f"trt_kvcache.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
