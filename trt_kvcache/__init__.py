"""The KV cache layer for TensorRT, in Python.

Each name is imported when it is first used, so importing the package takes milliseconds. The cache needs NumPy and ml_dtypes
only; CUDA, TensorRT and Hugging Face folders come with the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trt_kvcache._version import __version__

if TYPE_CHECKING:
    from trt_kvcache.builder.build_engine import build_engine
    from trt_kvcache.cache.config import CacheConfig, KVCacheConfig, KVLayerConfig
    from trt_kvcache.cache.estimate import estimate_memory, largest_batch, longest_sequence
    from trt_kvcache.cache.hybrid_cache_manager import HybridCacheManager
    from trt_kvcache.cache.hybrid_config import HybridCacheConfig, LayerType
    from trt_kvcache.cache.kv_cache_manager import KVCacheManager
    from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup
    from trt_kvcache.cache.layout import KVLayout
    from trt_kvcache.cache.lengths import Lengths
    from trt_kvcache.cache.linear_kv_cache import LinearKVCache
    from trt_kvcache.cache.mamba_cache_manager import MambaCacheManager
    from trt_kvcache.cache.mamba_config import MambaCacheConfig
    from trt_kvcache.engine.bindings import BindingPlan
    from trt_kvcache.engine.names import TensorNames
    from trt_kvcache.generation.sampler_state import SamplerState
    from trt_kvcache.generation.sampling import SamplingParams
    from trt_kvcache.memory.cuda_memory import CudaMemory
    from trt_kvcache.memory.host_memory import HostMemory
    from trt_kvcache.memory.tensor import DeviceTensor
    from trt_kvcache.sequences.model_identity import ModelIdentity
    from trt_kvcache.sequences.prompt_cache import PromptCache
    from trt_kvcache.sequences.sequence_cache_manager import SequenceCacheManager
    from trt_kvcache.sequences.snapshot import Snapshot, load_snapshot, save_snapshot
    from trt_kvcache.session.session import InferenceSession

_MODULE_OF = {
    "BindingPlan": "engine.bindings",
    "CacheConfig": "cache.config",
    "CudaMemory": "memory.cuda_memory",
    "DeviceTensor": "memory.tensor",
    "HostMemory": "memory.host_memory",
    "HybridCacheConfig": "cache.hybrid_config",
    "HybridCacheManager": "cache.hybrid_cache_manager",
    "InferenceSession": "session.session",
    "KVCacheConfig": "cache.config",
    "KVCacheManager": "cache.kv_cache_manager",
    "KVHeadDimGroup": "cache.kv_head_dim_group",
    "KVLayerConfig": "cache.config",
    "KVLayout": "cache.layout",
    "LayerType": "cache.hybrid_config",
    "Lengths": "cache.lengths",
    "LinearKVCache": "cache.linear_kv_cache",
    "MambaCacheConfig": "cache.mamba_config",
    "MambaCacheManager": "cache.mamba_cache_manager",
    "ModelIdentity": "sequences.model_identity",
    "PromptCache": "sequences.prompt_cache",
    "SamplerState": "generation.sampler_state",
    "SamplingParams": "generation.sampling",
    "SequenceCacheManager": "sequences.sequence_cache_manager",
    "Snapshot": "sequences.snapshot",
    "TensorNames": "engine.names",
    "build_engine": "builder.build_engine",
    "estimate_memory": "cache.estimate",
    "largest_batch": "cache.estimate",
    "load_snapshot": "sequences.snapshot",
    "longest_sequence": "cache.estimate",
    "save_snapshot": "sequences.snapshot",
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
