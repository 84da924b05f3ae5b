"""The decoder in PyTorch, without its attention. Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, D head_dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from trt_kvcache.checkpoint.decoder_weights import Projection
from trt_kvcache.model import AttentionConfig, ModelConfig, NormConfig
from trt_kvcache.torch_engine.weights import TorchLayer, TorchWeights

#: Called with the index of the layer and q, k and v of the new tokens ``[A, s, Hq + 2 * H, D]``, before RoPE; returns ``[A, s, Hq, D]``.
TorchAttention = Callable[[int, torch.Tensor], torch.Tensor]


class Elementwise:
    """What is computed between matrix products, by operations of torch."""

    def add_rms_norm(
        self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of two tensors ``[A, s, hidden]``, of which the first one is no longer needed, and the norm of the sum."""
        hidden = hidden + change
        return hidden, rms_norm(hidden, weight, eps)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) * up`` of ``[A, s, 2 * intermediate]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


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
    hidden = F.embedding(input_ids, weights.embedding)
    normed = rms_norm(hidden, weights.layers[0].input_norm, _epsilon(config.layers[0].input_norm))
    input_norms = [(layer.input_norm, part.input_norm) for layer, part in zip(weights.layers, config.layers, strict=True)]
    next_norms = [*input_norms[1:], (weights.final_norm, config.final_norm)]
    for index, (part, layer, (next_weight, next_norm)) in enumerate(zip(config.layers, weights.layers, next_norms, strict=True)):
        mixed = attention(index, heads_of(part.attention, layer, normed))
        hidden, normed = elementwise.add_rms_norm(hidden, project(layer.o, mixed.flatten(2)), layer.mlp_norm, _epsilon(part.mlp_norm))
        activated = elementwise.gated(project(layer.gate_up, normed))
        hidden, normed = elementwise.add_rms_norm(hidden, project(layer.down, activated), next_weight, _epsilon(next_norm))
    return normed


def _epsilon(norm: NormConfig | None) -> float:
    assert norm is not None  # models without are refused when an engine is made
    return norm.epsilon


def heads_of(mixer: AttentionConfig, layer: TorchLayer, normed: torch.Tensor) -> torch.Tensor:
    """Return q, k and v ``[A, s, Hq + 2 * H, D]`` of the new tokens, with the norms of q and k where the layer has them."""
    qkv = project(layer.qkv, normed).unflatten(2, (-1, mixer.head_dim))
    if mixer.qk_norm is None or layer.q_norm is None or layer.k_norm is None:
        return qkv
    q, k, v = qkv.split((mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads), dim=2)
    epsilon = mixer.qk_norm.norm.epsilon
    return torch.cat((rms_norm(q, layer.q_norm, epsilon), rms_norm(k, layer.k_norm, epsilon), v), dim=2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square of the last axis and multiply with ``weight``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def project(projection: Projection[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a linear map to ``x`` ``[..., in]``."""
    return F.linear(x, projection.weight, projection.bias)
