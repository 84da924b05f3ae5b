"""The decoder in PyTorch, without its attention. Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, D head_dim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.decoder_weights import Projection
from trt_kvcache.model import AttentionConfig, ModelConfig
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.weights import TorchLayer, TorchWeights

#: Called with the index of the layer and q, k and v of the new tokens ``[A, s, Hq + 2 * H, D]``, before RoPE, which it may overwrite;
#: returns ``[A, s, Hq, D]``.
TorchAttention = Callable[[int, torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class Elementwise:
    """What is computed between matrix products, by operations of torch."""

    def add_norm(self, hidden: torch.Tensor, change: torch.Tensor, norm: TorchNorm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of two tensors ``[A, s, hidden]``, of which the first one is no longer needed, and the norm of the sum."""
        hidden = hidden + change
        return hidden, normalised(hidden, norm)

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return ``activation(gate) * up`` of ``[A, s, 2 * intermediate]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up


def decoder_step(
    config: ModelConfig, weights: TorchWeights, attention: TorchAttention, elementwise: Elementwise, input_ids: torch.Tensor
) -> torch.Tensor:
    """Run the new tokens of every slot through the layers.

    Parameters
    ----------
    config : ModelConfig
        The model.
    weights : TorchWeights
        Its weights.
    attention : callable
        Attention over the cache of a layer.
    elementwise : Elementwise
        How sums, norms and gates are computed.
    input_ids : torch.Tensor int32 ``[A, s]``
        New tokens, right-padded.

    Returns
    -------
    torch.Tensor ``[A, s, hidden]``
        What the head is multiplied with, after the final norm, in the dtype of the weights.
    """
    hidden = scaled(F.embedding(input_ids, weights.embedding), weights.embedding_factor)
    normed = normalised(hidden, weights.layers[0].input_norm)
    next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
    for index, (part, layer, next_norm) in enumerate(zip(config.layers, weights.layers, next_norms, strict=True)):
        mixed = project(layer.o, attention(index, heads_of(part.attention, layer, normed)).flatten(2))
        change = scaled(normalised(mixed, layer.mixer_output_norm), part.residual_multiplier)
        hidden, normed = elementwise.add_norm(hidden, change, layer.mlp_norm)
        assert part.mlp is not None  # models without are refused when an engine is made
        activated = elementwise.gated(project(layer.gate_up, normed), part.mlp.activation)
        change = scaled(normalised(project(layer.down, activated), layer.mlp_output_norm), part.residual_multiplier)
        hidden, normed = elementwise.add_norm(hidden, change, next_norm)
    return normed


def heads_of(mixer: AttentionConfig, layer: TorchLayer, normed: torch.Tensor) -> torch.Tensor:
    """Return q, k and v ``[A, s, Hq + 2 * H, D]`` of the new tokens, with the norms of q and k where the layer has them."""
    qkv = project(layer.qkv, normed)
    if layer.q_norm is not None and layer.k_norm is not None:
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        q, k, v = qkv.split([count * mixer.head_dim for count in heads], dim=2)
        qkv = torch.cat((_norm_of_heads(q, layer.q_norm), _norm_of_heads(k, layer.k_norm), v), dim=2)
    return qkv.unflatten(2, (-1, mixer.head_dim))


def _norm_of_heads(heads: torch.Tensor, norm: TorchNorm) -> torch.Tensor:
    """Return the norm of ``[A, s, n * D]`` over as many elements as it has weights: a head, or all of them."""
    return norm(heads.unflatten(2, (-1, len(norm.weight)))).flatten(2)


def normalised(x: torch.Tensor, norm: TorchNorm | None) -> torch.Tensor:
    """Return the norm of ``x``: ``x`` itself where there is none."""
    return x if norm is None else norm(x)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x * factor``: ``x`` itself for a factor of 1."""
    return x if factor == 1 else x * factor


def project(projection: Projection[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a linear map to ``x`` ``[..., in]``."""
    return F.linear(x, projection.weight, projection.bias)
