"""Projections of the same input as one matrix, in the memory order of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trt_kvcache.torch_engine.operations import TorchMatrix, TorchProjection, dense
from trt_kvcache.torch_engine.packed_weight import PackedWeight, joined
from trt_kvcache.torch_engine.stored_weights import StoredWeights, arranged


def fused(stored: StoredWeights, *names: str) -> TorchProjection:
    """Return projections of the same input fused into one, with concatenated outputs."""
    parts = [stored.matrix(name) for name in names]
    biases = [part.bias for part in parts if part.bias is not None]
    return TorchProjection(_concatenated([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _concatenated(matrices: Sequence[TorchMatrix]) -> TorchMatrix:
    """Return the rows of several matrices as one: packed if all are, in the same format."""
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedWeight)]
    whole = joined(packed) if len(packed) == len(matrices) else None
    if whole is not None:
        return whole
    parts = [dense(matrix) for matrix in matrices]
    return arranged(parts[0] if len(parts) == 1 else torch.cat(parts))
