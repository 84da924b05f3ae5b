"""Projections of the same input as one matrix, in the memory order that the device multiplies fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trt_kvcache.kernels.compile import compile_ahead
from trt_kvcache.torch_engine.adapter_updates import fused_updates
from trt_kvcache.torch_engine.joined_matrices import joined_matrices
from trt_kvcache.torch_engine.kernel_variants import pair_variants
from trt_kvcache.torch_engine.operations import TorchMatrix, TorchProjection, dense
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix, PackedParts
from trt_kvcache.torch_engine.packed_weight import PackedWeight
from trt_kvcache.torch_engine.stored_weights import StoredWeights, arranged


def fused(stored: StoredWeights, *names: str) -> TorchProjection:
    """Return projections of the same input fused into one, with concatenated outputs."""
    return _fused([stored.matrix(name) for name in names])


def fused_before(down: TorchProjection, stored: StoredWeights, *names: str) -> tuple[TorchProjection, TorchProjection]:
    """Return projections fused into one, and ``down``, whose input i is a function of output i of each of them.

    If ``down`` takes its inputs in another order (act-order), the outputs have this order, so that no launch makes it.
    """
    parts, weight = [stored.matrix(name) for name in names], down.weight
    order = weight.order if isinstance(weight, PackedWeight) else None
    if order is None or not all(isinstance(part.weight, torch.Tensor | PackedWeight) for part in parts):
        return _fused(parts), down
    assert isinstance(weight, PackedWeight)
    update = None if down.update is None else down.update.with_inputs(order)
    return _fused([_with_outputs(part, order) for part in parts]), TorchProjection(replace(weight, order=None), down.bias, update)


def _with_outputs(projection: TorchProjection, order: torch.Tensor) -> TorchProjection:
    """Return a projection with its outputs in another order."""
    weight, bias = projection.weight, projection.bias
    assert isinstance(weight, torch.Tensor | PackedWeight)
    ordered = weight[order] if isinstance(weight, torch.Tensor) else weight.with_outputs(order)
    update = None if projection.update is None else projection.update.with_outputs(order)
    return TorchProjection(ordered, None if bias is None else bias[order], update)


def _fused(parts: Sequence[TorchProjection]) -> TorchProjection:
    biases = [part.bias for part in parts if part.bias is not None]
    update = fused_updates([part.update for part in parts], [part.outputs for part in parts])
    return TorchProjection(_concatenated([part.weight for part in parts]), torch.cat(biases) if biases else None, update)


def _concatenated(matrices: Sequence[TorchMatrix]) -> TorchMatrix:
    """Return the rows of several matrices as one: packed if all are, in parts of the same format."""
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    if len(packed) == len(matrices):
        return _packed(packed)
    parts = [dense(matrix) for matrix in matrices]
    return arranged(parts[0] if len(parts) == 1 else torch.cat(parts))


def _packed(matrices: Sequence[PackedMatrix]) -> PackedMatrix | PackedParts:
    parts = [matrices[0]]
    for matrix in matrices[1:]:
        whole = joined_matrices((parts[-1], matrix))
        parts[-1:] = (parts[-1], matrix) if whole is None else (whole,)
    if len(parts) == 1:
        return parts[0]
    found = PackedParts(tuple(parts))
    compile_ahead(pair_variants(found), parts[0].memory.arch)  # type: ignore[attr-defined]  # a GPU
    return found
