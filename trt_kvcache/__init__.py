"""The KV cache layer for TensorRT, in Python.

Each name is imported when it is first used, so importing the package takes milliseconds. The cache imports NumPy and ml_dtypes
only; names that need CUDA, TensorRT, Polygraphy or the libraries of Hugging Face import them.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trt_kvcache._util.extras import naming_the_extra
from trt_kvcache._version import __version__ as __version__

logging.getLogger("trt_kvcache").addHandler(logging.NullHandler())  # silent unless a program asks for it

if TYPE_CHECKING:  # for type checkers and editors: the same names as below
    from trt_kvcache.builder.build_engine import BuildReport as BuildReport, build_engine as build_engine
    from trt_kvcache.builder.estimate import BuildEstimate as BuildEstimate, estimate_build as estimate_build
    from trt_kvcache.builder.what_fits import Fit as Fit, what_fits as what_fits
    from trt_kvcache.cache.config import (
        CacheConfig as CacheConfig,
        HybridCacheConfig as HybridCacheConfig,
        KVCacheConfig as KVCacheConfig,
        LayerType as LayerType,
        MambaCacheConfig as MambaCacheConfig,
    )
    from trt_kvcache.cache.edge_llm import (
        HybridCacheManager as HybridCacheManager,
        KVCacheManager as KVCacheManager,
        LinearKVCache as LinearKVCache,
        MambaCacheManager as MambaCacheManager,
    )
    from trt_kvcache.cache.estimate import (
        estimate_memory as estimate_memory,
        largest_batch as largest_batch,
        longest_sequence as longest_sequence,
    )
    from trt_kvcache.cache.kv_head_dim_group import KVHeadDimGroup as KVHeadDimGroup
    from trt_kvcache.cache.kv_layer_config import KVLayerConfig as KVLayerConfig
    from trt_kvcache.cache.layout import KVLayout as KVLayout
    from trt_kvcache.cache.lengths import Lengths as Lengths
    from trt_kvcache.cache.plot import draw_cache as draw_cache
    from trt_kvcache.checkpoint import Checkpoint as Checkpoint, Tokenizer as Tokenizer
    from trt_kvcache.engine.bindings import BindingPlan as BindingPlan
    from trt_kvcache.engine.names import TensorNames as TensorNames
    from trt_kvcache.engine.protocol import (
        Engine as Engine,
        EngineProfile as EngineProfile,
        StatefulEngine as StatefulEngine,
        TensorMode as TensorMode,
        TensorSpec as TensorSpec,
    )
    from trt_kvcache.engine_folder.inspection import EngineInspection as EngineInspection, inspect_engine as inspect_engine
    from trt_kvcache.errors import (
        BindingError as BindingError,
        BuildError as BuildError,
        CapacityError as CapacityError,
        CaptureError as CaptureError,
        CheckpointError as CheckpointError,
        ClosedError as ClosedError,
        ConfigError as ConfigError,
        CudaError as CudaError,
        DTypeError as DTypeError,
        EngineError as EngineError,
        KVCacheError as KVCacheError,
        LayerIndexError as LayerIndexError,
        LayoutError as LayoutError,
        LengthsUnknown as LengthsUnknown,
        MappingError as MappingError,
        PlaceError as PlaceError,
        ProcessorError as ProcessorError,
        QueueFullError as QueueFullError,
        RangeError as RangeError,
        SequenceError as SequenceError,
        ShapeError as ShapeError,
        SlotError as SlotError,
        SnapshotError as SnapshotError,
        ThreadError as ThreadError,
    )
    from trt_kvcache.generation.chat_prompt import ChatPrompt as ChatPrompt
    from trt_kvcache.generation.draft_tree import DraftTree as DraftTree
    from trt_kvcache.generation.drafter import DraftedSequence as DraftedSequence, Drafter as Drafter
    from trt_kvcache.generation.prompt_score import PromptScore as PromptScore, perplexity as perplexity
    from trt_kvcache.generation.request import GeneratedToken as GeneratedToken
    from trt_kvcache.generation.sampler_state import SamplerState as SamplerState
    from trt_kvcache.generation.sampling import SamplingOptions as SamplingOptions, SamplingParams as SamplingParams
    from trt_kvcache.handles.sequence_cache_manager import SequenceCacheManager as SequenceCacheManager
    from trt_kvcache.memory.base import Memory as Memory
    from trt_kvcache.memory.cuda_memory import CudaMemory as CudaMemory
    from trt_kvcache.memory.host_memory import HostMemory as HostMemory
    from trt_kvcache.memory.tensor import DeviceTensor as DeviceTensor
    from trt_kvcache.model import ModelConfig as ModelConfig
    from trt_kvcache.ops.custom_op import CustomOp as CustomOp, TensorType as TensorType, run_on_host as run_on_host
    from trt_kvcache.ops.embedding_op import EmbeddingOp as EmbeddingOp
    from trt_kvcache.ops.registry import register_operation as register_operation, unregister_operation as unregister_operation
    from trt_kvcache.plot import Plot as Plot
    from trt_kvcache.polygraphy.feeds import greedy_feeds as greedy_feeds, make_feed as make_feed
    from trt_kvcache.polygraphy.network_script import NetworkScript as NetworkScript
    from trt_kvcache.polygraphy.path_comparison import compare_paths as compare_paths
    from trt_kvcache.polygraphy.runners import (
        RecomputeRunner as RecomputeRunner,
        ReferenceRunner as ReferenceRunner,
        SessionRunner as SessionRunner,
    )
    from trt_kvcache.reference import ReferenceEngine as ReferenceEngine
    from trt_kvcache.sequences.model_identity import ModelIdentity as ModelIdentity
    from trt_kvcache.sequences.prompt_cache import PromptCache as PromptCache, PromptEntry as PromptEntry, PromptMatch as PromptMatch
    from trt_kvcache.sequences.snapshot import Snapshot as Snapshot, load_snapshot as load_snapshot, save_snapshot as save_snapshot
    from trt_kvcache.session.async_request import AsyncRequest as AsyncRequest
    from trt_kvcache.session.async_session import AsyncSession as AsyncSession
    from trt_kvcache.session.load import load as load
    from trt_kvcache.session.open_model import EngineFallbackWarning as EngineFallbackWarning
    from trt_kvcache.session.request_handle import RequestHandle as RequestHandle
    from trt_kvcache.session.session import InferenceSession as InferenceSession
    from trt_kvcache.session.session_options import SessionOptions as SessionOptions
    from trt_kvcache.session.session_source import SessionSource as SessionSource
    from trt_kvcache.session.statistics import SessionStatistics as SessionStatistics
    from trt_kvcache.session.text_perplexity import TextPerplexity as TextPerplexity, text_perplexity as text_perplexity
    from trt_kvcache.session.timeline import Timeline as Timeline
    from trt_kvcache.session.token_stream import TokenStream as TokenStream
    from trt_kvcache.trt.segmented_engine import SegmentedEngine as SegmentedEngine
    from trt_kvcache.trt.tensorrt_engine import TensorRTEngine as TensorRTEngine

_MODULE_OF = {
    "AsyncRequest": "session.async_request",
    "AsyncSession": "session.async_session",
    "BindingError": "errors",
    "BindingPlan": "engine.bindings",
    "BuildError": "errors",
    "BuildEstimate": "builder.estimate",
    "BuildReport": "builder.build_engine",
    "CacheConfig": "cache.config",
    "CapacityError": "errors",
    "CaptureError": "errors",
    "ChatPrompt": "generation.chat_prompt",
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "CudaError": "errors",
    "CudaMemory": "memory.cuda_memory",
    "CustomOp": "ops.custom_op",
    "DTypeError": "errors",
    "DeviceTensor": "memory.tensor",
    "DraftTree": "generation.draft_tree",
    "DraftedSequence": "generation.drafter",
    "Drafter": "generation.drafter",
    "EmbeddingOp": "ops.embedding_op",
    "Engine": "engine.protocol",
    "EngineError": "errors",
    "EngineFallbackWarning": "session.open_model",
    "EngineInspection": "engine_folder.inspection",
    "EngineProfile": "engine.protocol",
    "Fit": "builder.what_fits",
    "GeneratedToken": "generation.request",
    "HostMemory": "memory.host_memory",
    "HybridCacheConfig": "cache.config",
    "HybridCacheManager": "cache.edge_llm",
    "InferenceSession": "session.session",
    "KVCacheConfig": "cache.config",
    "KVCacheError": "errors",
    "KVCacheManager": "cache.edge_llm",
    "KVHeadDimGroup": "cache.kv_head_dim_group",
    "KVLayerConfig": "cache.kv_layer_config",
    "KVLayout": "cache.layout",
    "LayerIndexError": "errors",
    "LayerType": "cache.config",
    "LayoutError": "errors",
    "Lengths": "cache.lengths",
    "LengthsUnknown": "errors",
    "LinearKVCache": "cache.edge_llm",
    "MambaCacheConfig": "cache.config",
    "MambaCacheManager": "cache.edge_llm",
    "MappingError": "errors",
    "Memory": "memory.base",
    "ModelConfig": "model",
    "ModelIdentity": "sequences.model_identity",
    "NetworkScript": "polygraphy.network_script",
    "PlaceError": "errors",
    "ProcessorError": "errors",
    "PromptCache": "sequences.prompt_cache",
    "PromptEntry": "sequences.prompt_cache",
    "PromptMatch": "sequences.prompt_cache",
    "PromptScore": "generation.prompt_score",
    "QueueFullError": "errors",
    "RangeError": "errors",
    "RecomputeRunner": "polygraphy.runners",
    "ReferenceEngine": "reference",
    "ReferenceRunner": "polygraphy.runners",
    "RequestHandle": "session.request_handle",
    "SamplerState": "generation.sampler_state",
    "SamplingOptions": "generation.sampling",
    "SamplingParams": "generation.sampling",
    "SegmentedEngine": "trt.segmented_engine",
    "SequenceCacheManager": "handles.sequence_cache_manager",
    "SequenceError": "errors",
    "SessionOptions": "session.session_options",
    "SessionRunner": "polygraphy.runners",
    "SessionSource": "session.session_source",
    "TextPerplexity": "session.text_perplexity",
    "Timeline": "session.timeline",
    "SessionStatistics": "session.statistics",
    "ShapeError": "errors",
    "SlotError": "errors",
    "Snapshot": "sequences.snapshot",
    "SnapshotError": "errors",
    "StatefulEngine": "engine.protocol",
    "TensorMode": "engine.protocol",
    "TensorNames": "engine.names",
    "TensorRTEngine": "trt.tensorrt_engine",
    "TensorSpec": "engine.protocol",
    "TensorType": "ops.custom_op",
    "ThreadError": "errors",
    "TokenStream": "session.token_stream",
    "Tokenizer": "checkpoint",
    "build_engine": "builder.build_engine",
    "estimate_build": "builder.estimate",
    "compare_paths": "polygraphy.path_comparison",
    "estimate_memory": "cache.estimate",
    "draw_cache": "cache.plot",
    "Plot": "plot",
    "greedy_feeds": "polygraphy.feeds",
    "inspect_engine": "engine_folder.inspection",
    "largest_batch": "cache.estimate",
    "load": "session.load",
    "load_snapshot": "sequences.snapshot",
    "longest_sequence": "cache.estimate",
    "make_feed": "polygraphy.feeds",
    "perplexity": "generation.prompt_score",
    "register_operation": "ops.registry",
    "run_on_host": "ops.custom_op",
    "save_snapshot": "sequences.snapshot",
    "text_perplexity": "session.text_perplexity",
    "unregister_operation": "ops.registry",
    "what_fits": "builder.what_fits",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trt_kvcache' has no attribute {name!r}")
    with naming_the_extra():
        value = getattr(import_module(f"trt_kvcache.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
