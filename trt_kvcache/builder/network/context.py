"""``DecoderContext``: what all layers of a decoder's network share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.builder.network.attention_lowering import AttentionLowering
from trt_kvcache.builder.network.new_tokens import NewTokens
from trt_kvcache.builder.network.rope import RopeTables
from trt_kvcache.builder.network.step_lengths import StepLengths
from trt_kvcache.builder.network.unit_triangle import UnitTriangle
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.decoder_segments import RopeKind
from trt_kvcache.model import ModelConfig, QueryScaling


@dataclass(frozen=True, kw_only=True)
class DecoderContext:
    """What all layers of a decoder's network share."""

    model: ModelConfig
    names: TensorNames
    max_sequence_length: int
    attention: Mapping[int, AttentionLayerConfig]
    indices: tuple[int | None, ...]
    states: Sequence[Mapping[StateKind, tuple[TensorSpec, TensorSpec]]]
    new_tokens: NewTokens
    unit_triangle: UnitTriangle
    lengths: StepLengths | None = None
    tables: Mapping[RopeKind, RopeTables] = field(default_factory=dict)
    query_factors: Mapping[QueryScaling, Any] = field(default_factory=dict)
    masks: Mapping[int | None, Any] = field(default_factory=dict)
    lowering: AttentionLowering | None = None
