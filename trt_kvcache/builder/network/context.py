"""``DecoderContext``: inputs and tables that all layers of a decoder's network share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.builder.network.adapter_updates import AdapterUpdates
from trt_kvcache.builder.network.attention_lowering import AttentionLowering
from trt_kvcache.builder.network.new_tokens import NewTokens
from trt_kvcache.builder.network.per_layer_input import PerLayerInputs
from trt_kvcache.builder.network.plugin_nodes import DecoderPluginLayers
from trt_kvcache.builder.network.rope import RopeTables
from trt_kvcache.builder.network.step_lengths import StepLengths
from trt_kvcache.builder.network.unit_triangle import UnitTriangle
from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.engine.attention_variants import AttentionLayerConfig
from trt_kvcache.engine.decoder_tensors import CacheIndices
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorSpec
from trt_kvcache.engine_folder.decoder_segments import RopeKind
from trt_kvcache.model import ModelConfig, QueryScaling


@dataclass(frozen=True, kw_only=True)
class DecoderContext:
    """Inputs and tables that all layers of a decoder's network share."""

    model: ModelConfig
    names: TensorNames
    max_sequence_length: int  # tokens that a slot can hold, S
    attention: Mapping[int, AttentionLayerConfig]  # by layer, for layers with attention
    indices: tuple[CacheIndices, ...]  # of the K and V, and the states, of each layer in the cache
    states: Sequence[Mapping[StateKind, tuple[TensorSpec, TensorSpec]]]  # past and present tensors of each layer with states
    new_tokens: NewTokens
    unit_triangle: UnitTriangle
    per_layer: PerLayerInputs | None = None  # for a model with per-layer embeddings
    lengths: StepLengths | None = None  # not for the plugin variant
    tables: Mapping[RopeKind, RopeTables] = field(default_factory=dict)  # by kind of RoPE; not for the plugin variant
    query_factors: Mapping[QueryScaling, Any] = field(default_factory=dict)  # [B, s, 1, 1] float32; not for the plugin variant
    stored: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # keys and values [B, H, S, D] by layer, as layers are added
    masks: Mapping[int | None, Any] = field(default_factory=dict)  # [B, 1, s, S] bool by window; for the mask variant
    lowering: AttentionLowering | None = None  # for the plugin variant
    plugin_layers: DecoderPluginLayers | None = None  # for the plugin variant in one plan
    updates: AdapterUpdates | None = None  # of adapters, for a build with inputs for them
