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
    """What all layers of a decoder's network share.

    Parameters
    ----------
    model : ModelConfig
        Configuration of the model.
    names : TensorNames
        Names of the network's inputs and outputs.
    max_sequence_length : int
        Tokens that a slot can hold, S.
    attention : mapping of int to AttentionLayerConfig
        How the attention of a layer is built, by its index.
    indices : tuple of int or None
        For each layer which of the caches it has: see :func:`~trt_kvcache.engine.decoder_tensors.indices_in_kind`.
    states : sequence of mapping
        For each layer with states its tensors before and after the step.
    new_tokens : NewTokens
        How many of the new tokens each slot has, for layers with states.
    unit_triangle : UnitTriangle
        What inverts the matrices of gated delta nets.
    lengths : StepLengths, optional
        Lengths of a step; not for the ``plugin`` variant.
    tables : mapping of RopeKind to RopeTables
        Cosines and sines of RoPE; not for the ``plugin`` variant.
    query_factors : mapping of QueryScaling to ITensor [B, s, 1, 1] float32
        Factors of queries by position; not for the ``plugin`` variant.
    masks : mapping of int or None to ITensor [B, 1, s, S] bool
        By window, which keys each token sees; only for the ``mask`` variant.
    lowering : AttentionLowering, optional
        What adds the attention to the network; only for the ``plugin`` variant.
    """

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
