"""The decoder in PyTorch, apart from caches. Shapes: A slots, s new tokens per slot."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.torch_engine.operations import Operations, normalised, scaled
from trt_kvcache.torch_engine.weights import TorchWeights


def decoder_step(
    weights: TorchWeights,
    operations: Operations,
    input_ids: torch.Tensor,
    rows: torch.Tensor | None = None,
    hidden_inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output ``[A, s, hidden]`` of the final norm for the right-padded ``input_ids`` int32 ``[A, s]``.

    ``rows``: of token ids past the vocabulary. ``hidden_inputs [A, s, hidden]``: of an MTP head.
    """
    hidden = embedded(weights, input_ids) if rows is None else embedded_with(rows, weights, input_ids)
    if hidden_inputs is not None:
        assert weights.merge is not None
        hidden = weights.merge(hidden, hidden_inputs)
    if weights.per_layer is not None:
        operations = replace(operations, per_layer_inputs=weights.per_layer.inputs(input_ids, hidden, operations))
    normed = normalised(hidden, weights.blocks[0].norm)
    next_norms = [*((block.norm, block.shares_input) for block in weights.blocks[1:]), (weights.final_norm, False)]
    for block, (next_norm, is_shared) in zip(weights.blocks, next_norms, strict=True):
        change = block.part(normed, operations)
        summed_norm = next_norm if block.scale is None else None
        hidden, next_normed = operations.elementwise.add_norm(hidden, change, summed_norm, block.output_norm, block.factor)
        if block.scale is not None:
            hidden = hidden * block.scale
            next_normed = normalised(hidden, next_norm)
        normed = normed if is_shared else next_normed
    return normed


def embedded(weights: TorchWeights, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of the embedding, scaled."""
    return scaled(F.embedding(input_ids, weights.embedding), weights.embedding_factor)


def embedded_with(rows: torch.Tensor, weights: TorchWeights, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the same, with ``rows`` as they are for token ids past the vocabulary. The work does not depend on the ids."""
    vocab_size = weights.embedding.shape[0]
    hidden = embedded(weights, input_ids.clamp(max=vocab_size - 1))
    return torch.where((input_ids >= vocab_size)[..., None], F.embedding((input_ids - vocab_size).clamp(min=0), rows), hidden)
