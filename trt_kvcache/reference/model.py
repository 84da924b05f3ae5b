"""The decoder in NumPy, without its attention: pure functions over float32 arrays.

Everything is accumulated in float32, whatever the dtype of weights and cache. Shapes: A slots, s new tokens per slot,
Hq query heads, H key-value heads, D head_dim.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.model_config import ModelConfig
from trt_kvcache.reference.attention import LayerAttention
from trt_kvcache.reference.weights import DecoderWeights, Float32, LayerWeights, Projection


def decoder_step(
    config: ModelConfig,
    weights: DecoderWeights,
    attentions: Sequence[LayerAttention],
    input_ids: npt.NDArray[np.int32],
    last: npt.NDArray[np.int32],
) -> Float32:
    """Run the new tokens of every slot through the model.

    Parameters
    ----------
    config : ModelConfig
        The model.
    weights : DecoderWeights
        Its weights.
    attentions : sequence of callable
        One per layer: attention over the cache of that layer.
    input_ids : ndarray int32 ``[A, s]``
        New tokens, right-padded.
    last : ndarray int32 ``[A, m]``
        Indices of the tokens whose logits are returned, per slot.

    Returns
    -------
    ndarray float32 ``[A * m, vocab]``
        Logits of the tokens that ``last`` selects, slot by slot.
    """
    hidden = weights.embedding[input_ids]
    for layer, attention in zip(weights.layers, attentions, strict=True):
        normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        hidden = hidden + self_attention(config, layer, attention, normed)
        normed = rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
        hidden = hidden + mlp(layer, normed)
    wanted = hidden[np.arange(len(last))[:, None], last].reshape(-1, config.hidden_size)
    logits: Float32 = rms_norm(wanted, weights.final_norm, config.rms_norm_eps) @ weights.head.T
    return logits


def self_attention(config: ModelConfig, layer: LayerWeights, attention: LayerAttention, hidden: Float32) -> Float32:
    """Apply the self-attention block of one layer.

    Parameters
    ----------
    config : ModelConfig
        The model.
    layer : LayerWeights
        Weights of the layer.
    attention : callable
        Attention over the cache of the layer.
    hidden : ndarray float32 ``[A, s, hidden]``
        Normalised input.

    Returns
    -------
    ndarray float32 ``[A, s, hidden]``
        The result after the output projection. The caller adds it to the residual.
    """
    slots, width, _ = hidden.shape
    q, k, v = (project(part, hidden).reshape(slots, width, -1, config.head_dim) for part in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
    return project(layer.o, attention(q, k, v).reshape(slots, width, -1))


def mlp(layer: LayerWeights, hidden: Float32) -> Float32:
    """Apply the gated MLP with SiLU to ``hidden`` ``[..., hidden]``; the result has the same shape."""
    gate = project(layer.gate, hidden)
    activated: Float32 = gate / (np.float32(1) + np.exp(-gate))
    return project(layer.down, activated * project(layer.up, hidden))


def project(projection: Projection, x: Float32) -> Float32:
    """Apply a linear map to ``x`` ``[..., in]`` and return ``[..., out]``, with all rows in one matrix product."""
    rows: Float32 = x.reshape(-1, x.shape[-1]) @ projection.weight.T
    if projection.bias is not None:
        rows += projection.bias
    return rows.reshape(*x.shape[:-1], -1)


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Divide by the root mean square of the last axis and multiply with ``weight``."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Float32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed
