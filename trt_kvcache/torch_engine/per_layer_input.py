"""Per-layer embeddings: the inputs of all layers in a step, and the part of a layer that adds its input to the hidden state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_kvcache.checkpoint.decoder_weights import NormWeights
from trt_kvcache.model import ModelConfig, PerLayerInputConfig
from trt_kvcache.model.tensor_shapes import PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION
from trt_kvcache.torch_engine.fused_projections import fused
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.operations import Operations, TorchProjection
from trt_kvcache.torch_engine.row_lookup import Table
from trt_kvcache.torch_engine.stored_rows import LoadRows, StoredRows
from trt_kvcache.torch_engine.stored_weights import LoadTensor, StoredWeights, arranged


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbedding:
    """A second embedding ``[vocab, layers * size]``, whose rows are scaled by ``factor``, and a scaled projection to its width."""

    embedding: Table | StoredRows
    factor: float
    projection: TorchProjection
    projection_factor: float
    norm: TorchNorm

    @classmethod
    def of(cls, config: ModelConfig, dtype: str, load: LoadTensor, load_rows: LoadRows) -> PerLayerEmbedding | None:
        """Return the per-layer embedding of a model; None without one."""
        if config.per_layer_embedding is None:
            return None
        rows = load_rows(PER_LAYER_EMBEDDING)
        return cls(
            embedding=load(PER_LAYER_EMBEDDING) if rows is None else rows,
            factor=config.per_layer_embedding.factor(dtype),
            projection=TorchProjection(arranged(load(PER_LAYER_PROJECTION)), None),
            projection_factor=config.hidden_size**-0.5,
            norm=TorchNorm.of(config.per_layer_embedding.norm, NormWeights(load(PER_LAYER_NORM), None)),
        )

    def inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the inputs ``[layers, A, s, size]`` of all layers. ``hidden``: input of the first one."""
        size = len(self.norm.weight)
        projected = operations.projections.project(self.projection, hidden) * self.projection_factor
        table, rows_of = self.embedding, operations.look_up
        rows = (table(input_ids, rows_of) if isinstance(table, StoredRows) else rows_of(table, input_ids)) * self.factor
        mixed = (self.norm(projected.unflatten(2, (-1, size))) + rows.unflatten(2, (-1, size))) * 0.5**0.5
        return mixed.movedim(2, 0)


@dataclass(frozen=True, kw_only=True)
class PerLayerInput:
    """The gate of layer ``index`` for its per-layer input, and the projection back."""

    index: int
    config: PerLayerInputConfig
    gate: TorchProjection
    projection: TorchProjection

    @classmethod
    def of(cls, index: int, config: PerLayerInputConfig, stored: StoredWeights) -> PerLayerInput:
        """Return the part of a layer with stored weights."""
        return cls(index=index, config=config, gate=fused(stored, "per_layer_gate"), projection=fused(stored, "per_layer_projection"))

    def __call__(self, hidden: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Return the output."""
        assert operations.per_layer_inputs is not None
        project = operations.projections.project
        gate, factor = project(self.gate, hidden), operations.per_layer_inputs[self.index]
        return project(self.projection, operations.elementwise.activated_mul(gate, factor, self.config.activation))
