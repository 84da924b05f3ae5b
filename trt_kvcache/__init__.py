"""The KV cache layer for TensorRT, in Python.

Each name is imported when it is first used, so importing the package takes milliseconds. The cache needs NumPy and ml_dtypes
only; CUDA, TensorRT and Hugging Face folders come with the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trt_kvcache._version import __version__

if TYPE_CHECKING:
    from trt_kvcache.bindings import BindingPlan
    from trt_kvcache.builder import build_engine
    from trt_kvcache.config import CacheConfig, KVCacheConfig, KVLayerConfig
    from trt_kvcache.cuda_memory import CudaMemory
    from trt_kvcache.estimate import estimate_memory, largest_batch, longest_sequence
    from trt_kvcache.host_memory import HostMemory
    from trt_kvcache.hybrid import HybridCacheManager
    from trt_kvcache.hybrid_config import HybridCacheConfig, LayerType
    from trt_kvcache.kv_rows import KVHeadDimGroup
    from trt_kvcache.layout import KVLayout
    from trt_kvcache.lengths import Lengths
    from trt_kvcache.linear import LinearKVCache
    from trt_kvcache.mamba import MambaCacheManager
    from trt_kvcache.mamba_config import MambaCacheConfig
    from trt_kvcache.manager import KVCacheManager
    from trt_kvcache.names import TensorNames
    from trt_kvcache.prompt_cache import PromptCache
    from trt_kvcache.sampling import SamplingParams
    from trt_kvcache.sequences import SequenceCacheManager
    from trt_kvcache.session import InferenceSession
    from trt_kvcache.snapshot import Snapshot, load_snapshot, save_snapshot
    from trt_kvcache.snapshot_records import ModelIdentity, SamplerState
    from trt_kvcache.tensor import DeviceTensor

_MODULE_OF = {
    "BindingPlan": "bindings",
    "CacheConfig": "config",
    "CudaMemory": "cuda_memory",
    "DeviceTensor": "tensor",
    "HostMemory": "host_memory",
    "HybridCacheConfig": "hybrid_config",
    "HybridCacheManager": "hybrid",
    "InferenceSession": "session",
    "KVCacheConfig": "config",
    "KVCacheManager": "manager",
    "KVHeadDimGroup": "kv_rows",
    "KVLayerConfig": "config",
    "KVLayout": "layout",
    "LayerType": "hybrid_config",
    "Lengths": "lengths",
    "LinearKVCache": "linear",
    "MambaCacheConfig": "mamba_config",
    "MambaCacheManager": "mamba",
    "ModelIdentity": "snapshot_records",
    "PromptCache": "prompt_cache",
    "SamplerState": "snapshot_records",
    "SamplingParams": "sampling",
    "SequenceCacheManager": "sequences",
    "Snapshot": "snapshot",
    "TensorNames": "names",
    "build_engine": "builder",
    "estimate_memory": "estimate",
    "largest_batch": "estimate",
    "load_snapshot": "snapshot",
    "longest_sequence": "estimate",
    "save_snapshot": "snapshot",
}

__all__ = [
    "BindingPlan",
    "CacheConfig",
    "CudaMemory",
    "DeviceTensor",
    "HostMemory",
    "HybridCacheConfig",
    "HybridCacheManager",
    "InferenceSession",
    "KVCacheConfig",
    "KVCacheManager",
    "KVHeadDimGroup",
    "KVLayerConfig",
    "KVLayout",
    "LayerType",
    "Lengths",
    "LinearKVCache",
    "MambaCacheConfig",
    "MambaCacheManager",
    "ModelIdentity",
    "PromptCache",
    "SamplerState",
    "SamplingParams",
    "SequenceCacheManager",
    "Snapshot",
    "TensorNames",
    "__version__",
    "build_engine",
    "estimate_memory",
    "largest_batch",
    "load_snapshot",
    "longest_sequence",
    "save_snapshot",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trt_kvcache' has no attribute {name!r}")
    value = getattr(import_module(f"trt_kvcache.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
