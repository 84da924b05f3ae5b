"""The decoder in PyTorch, apart from caches. Shapes: A slots, s new tokens per slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.torch_engine.operations import Operations, normalised, scaled
from trt_kvcache.torch_engine.weights import TorchWeights


def decoder_step(weights: TorchWeights, operations: Operations, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the output ``[A, s, hidden]`` of the final norm for the right-padded ``input_ids`` int32 ``[A, s]``."""
    hidden = scaled(F.embedding(input_ids, weights.embedding), weights.embedding_factor)
    normed = normalised(hidden, weights.blocks[0].norm)
    next_norms = [*((block.norm, block.shares_input) for block in weights.blocks[1:]), (weights.final_norm, False)]
    for block, (next_norm, is_shared) in zip(weights.blocks, next_norms, strict=True):
        change = block.part(normed, operations)
        hidden, next_normed = operations.elementwise.add_norm(hidden, change, next_norm, block.output_norm, block.factor)
        normed = normed if is_shared else next_normed
    return normed
