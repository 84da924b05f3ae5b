"""What an engine folder holds, from its ``config.json`` alone: no GPU, no TensorRT."""

import os
from dataclasses import dataclass
from pathlib import Path

from trt_kvcache.cache.config import KVCacheConfig
from trt_kvcache.cache.estimate import MemoryEstimate, estimate_memory
from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.protocol import EngineProfile, TensorSpec
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.engine_folder.records import CheckpointRecord, SegmentsRecord


@dataclass(frozen=True, kw_only=True)
class EngineInspection:
    """An engine in plain values, for people and scripts.

    Parameters
    ----------
    path : Path
        The folder.
    tensorrt_flavour, tensorrt_version : str
        What built it.
    compute_capabilities : tuple of str, or None
        GPUs it was built for; None: all that TensorRT for RTX knows, or the GPU of the build.
    dtype : str
        What it computes in.
    model : ModelConfig
    cache : KVCacheConfig
    tensors : tuple of TensorSpec
        With shapes, dtypes, modes and aliases.
    profiles : tuple of EngineProfile
    attention : tuple of AttentionLayerConfig
        Per layer: variant, whether it was made decomposable, and why.
    plan_nbytes : int
        Of the serialised engine, or of those of all segments.
    segments : SegmentsRecord or None
        Of an engine in segments: its segments and operations, in order.
    memory : MemoryEstimate
        Of the cache: per layer, per sequence, in all.
    checkpoint : CheckpointRecord
    """

    path: Path
    tensorrt_flavour: str
    tensorrt_version: str
    compute_capabilities: tuple[str, ...] | None
    dtype: str
    model: ModelConfig
    cache: KVCacheConfig
    tensors: tuple[TensorSpec, ...]
    profiles: tuple[EngineProfile, ...]
    attention: tuple[AttentionLayerConfig, ...]
    plan_nbytes: int
    memory: MemoryEstimate
    checkpoint: CheckpointRecord
    segments: SegmentsRecord | None

    @property
    def decomposable_layers(self) -> tuple[AttentionLayerConfig, ...]:
        """The layers whose attention may run as plain layers instead of a fused kernel."""
        return tuple(choice for choice in self.attention if choice.decomposable)


def inspect_engine(path: str | os.PathLike[str]) -> EngineInspection:
    """Read an engine folder. Raises :class:`EngineError` for what is not one, or is damaged."""
    folder = EngineFolder.open(path)
    config = folder.config
    return EngineInspection(
        path=folder.path,
        tensorrt_flavour=config.tensorrt_flavour,
        tensorrt_version=config.tensorrt_version,
        compute_capabilities=config.compute_capabilities,
        dtype=config.dtype,
        model=config.model,
        cache=config.cache,
        tensors=config.tensors,
        profiles=config.profiles,
        attention=config.attention,
        plan_nbytes=config.plan.nbytes,
        memory=estimate_memory(config.cache),
        checkpoint=config.checkpoint,
        segments=config.segments,
    )
