"""The decoder in PyTorch, apart from caches. Shapes: A slots, s new tokens per slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.torch_engine.operations import Operations, normalised, scaled
from trt_kvcache.torch_engine.weights import TorchWeights


@dataclass(frozen=True)
class KeptLayers:
    """``rows [A, s, width]``, to be written: the residual stream before each of ``layers``, side by side."""

    rows: torch.Tensor
    layers: tuple[int, ...]

    def keep(self, hidden: torch.Tensor, index: int) -> None:
        """Write the residual stream before layer ``index`` to its places."""
        for place, layer in enumerate(self.layers):
            if layer == index:
                self.rows[..., place * hidden.shape[-1] : (place + 1) * hidden.shape[-1]] = hidden


def decoder_step(
    weights: TorchWeights,
    operations: Operations,
    input_ids: torch.Tensor,
    rows: torch.Tensor | None = None,
    hidden_inputs: torch.Tensor | None = None,
    kept: KeptLayers | None = None,
) -> torch.Tensor:
    """Return the output ``[A, s, hidden]`` of the final norm for the right-padded ``input_ids`` int32 ``[A, s]``.

    ``rows``: of token ids past the vocabulary. ``hidden_inputs [A, s, width]``: of a draft head.
    """
    hidden = embedded(weights, input_ids) if rows is None else embedded_with(rows, weights, input_ids)
    mixer_input: torch.Tensor | None = None
    if hidden_inputs is not None and weights.assistant is not None:
        hidden = F.linear(torch.cat((hidden, hidden_inputs), dim=-1), weights.assistant.pre_projection)
    elif hidden_inputs is not None:
        assert weights.merge is not None
        hidden, mixer_input = weights.merge(hidden, hidden_inputs)
    if weights.per_layer is not None:
        operations = replace(operations, per_layer_inputs=weights.per_layer.inputs(input_ids, hidden, operations))
    normed = normalised(hidden, weights.blocks[0].norm) if mixer_input is None else mixer_input
    layer = -1
    next_norms = [*((block.norm, block.shares_input) for block in weights.blocks[1:]), (weights.final_norm, False)]
    for block, (next_norm, is_shared) in zip(weights.blocks, next_norms, strict=True):
        if kept is not None and block.layer != layer:
            layer = block.layer
            kept.keep(hidden, layer)
        change = block.part(normed, operations)
        hidden, next_normed = operations.elementwise.add_norm(hidden, change, next_norm, block.output_norm, block.factor, block.scale)
        normed = normed if is_shared else next_normed
    if kept is not None:
        kept.keep(hidden, layer + 1)
    return normed


def embedded(weights: TorchWeights, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the rows of the embedding, scaled."""
    return scaled(F.embedding(input_ids, weights.embedding), weights.embedding_factor)


def embedded_with(rows: torch.Tensor, weights: TorchWeights, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the same, with ``rows`` as they are for token ids past the vocabulary. The work does not depend on the ids."""
    vocab_size = weights.embedding.shape[0]
    hidden = embedded(weights, input_ids.clamp(max=vocab_size - 1))
    return torch.where((input_ids >= vocab_size)[..., None], F.embedding((input_ids - vocab_size).clamp(min=0), rows), hidden)
