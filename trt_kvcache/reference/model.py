"""The decoder in NumPy, apart from caches: pure functions over float32 arrays.

Everything is accumulated in float32, whatever the dtype of weights and cache. Shapes: A slots, s new tokens per slot,
Hq query heads, H key-value heads, D head_dim.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from trt_kvcache.model import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig
from trt_kvcache.reference.attention import LayerAttention, RotatedBeforeNorms, softcapped
from trt_kvcache.reference.blas_threads import one_blas_thread
from trt_kvcache.reference.weights import DecoderLayerWeights, DecoderWeights, Float32, NormWeights, Projection

#: Function of the weights of a recurrent layer and its normalised input ``[A, s, hidden]``; returns ``[A, s, hidden]``.
LayerRecurrence = Callable[[DecoderLayerWeights, Float32], Float32]

#: Operation of a layer on its cache: attention over K and V, a recurrence, or None.
LayerCache = LayerAttention | LayerRecurrence | None


def decoder_step(
    config: ModelConfig,
    weights: DecoderWeights,
    caches: Sequence[LayerCache],
    input_ids: npt.NDArray[np.int32],
    last: npt.NDArray[np.int32],
    dtype: str,
) -> Float32:
    """Return the logits ``[A * m, vocab]`` of the tokens ``last [A, m]`` of the right-padded ``input_ids [A, s]``.

    ``dtype``: precision of the engine, to which the embedding multiplier may be rounded.
    """
    hidden = scaled(weights.embedding[input_ids], config.embedding_factor(dtype))
    with one_blas_thread(input_ids.size, _largest_weight(weights)):
        for layer, layer_weights, cache in zip(config.layers, weights.layers, caches, strict=True):
            hidden = decoder_layer(layer, layer_weights, cache, hidden)
    wanted = hidden[np.arange(len(last))[:, None], last].reshape(-1, config.hidden_size)
    with one_blas_thread(len(wanted), weights.head.size):
        logits: Float32 = optional_norm(wanted, weights.final_norm, config.final_norm) @ weights.head.T
    logits = logits if config.logits_divisor == 1 else logits / np.float32(config.logits_divisor)
    return logits if config.final_softcap is None else softcapped(logits, config.final_softcap)


def _largest_weight(weights: DecoderWeights) -> int:
    """Return the size of the first layer's largest weight: the others are about as large."""
    return max([weight.size for layer in weights.layers[:1] for weight in layer.parts.values()], default=0)


def decoder_layer(config: LayerConfig, weights: DecoderLayerWeights, cache: LayerCache, hidden: Float32) -> Float32:
    """Apply one decoder layer to ``hidden [A, s, hidden]``, which is not changed."""
    normed = optional_norm(hidden, weights.input_norm, config.input_norm)
    if config.mixer is not None:
        assert cache is not None
        if isinstance(config.mixer, AttentionConfig):
            mixed = self_attention(config.mixer, weights, cast(LayerAttention, cache), normed)
        else:
            mixed = cast(LayerRecurrence, cache)(weights, normed)
        mixed = optional_norm(mixed, weights.mixer_output_norm, config.mixer_output_norm)
        hidden = hidden + scaled(mixed, config.residual_multiplier)
    if config.mlp is not None:
        normed = normed if config.parallel else optional_norm(hidden, weights.mlp_norm, config.mlp_norm)
        changed = optional_norm(mlp(config.mlp, weights, normed), weights.mlp_output_norm, config.mlp_output_norm)
        hidden = hidden + scaled(changed, config.residual_multiplier)
    return hidden


def self_attention(config: AttentionConfig, layer: DecoderLayerWeights, attention: LayerAttention, hidden: Float32) -> Float32:
    """Apply the self-attention of one layer to its normalised input ``[A, s, hidden]``, with the output projection."""
    q, k, v = project(layer.q, hidden), project(layer.k, hidden), project(layer.v, hidden)
    over = None if config.qk_norm is None else config.qk_norm.over
    if over == "full":
        q, k = qk_norm(config, layer, q, k)
    q, k, v = [part.reshape(*part.shape[:2], -1, config.head_dim) for part in (q, k, v)]
    if config.rotates_before_norm:
        q, k = cast(RotatedBeforeNorms, attention).rotated(q, k)
    if over == "head":
        q, k = qk_norm(config, layer, q, k)
    attended = attention(q, k, v)
    attended = attended.reshape(*attended.shape[:2], -1)
    if config.output_gate:
        attended = attended * sigmoid(project(layer.projection("output_gate"), hidden))
    return project(layer.o, attended)


def qk_norm(config: AttentionConfig, layer: DecoderLayerWeights, q: Float32, k: Float32) -> tuple[Float32, Float32]:
    """Normalise q and k over their last axis: one head, or all of them."""
    assert config.qk_norm is not None
    norm = config.qk_norm.norm
    return optional_norm(q, layer.q_norm, norm), optional_norm(k, layer.k_norm, norm)


def mlp(config: MlpConfig, layer: DecoderLayerWeights, hidden: Float32) -> Float32:
    """Apply the MLP to ``hidden`` ``[..., hidden]``; the result has the same shape."""
    activation, up = _ACTIVATIONS[config.activation], project(layer.up, hidden)
    return project(layer.down, activation(project(layer.gate, hidden)) * up if config.gated else activation(up))


def sigmoid(x: Float32) -> Float32:
    """Return ``1 / (1 + exp(-x))``."""
    activated: Float32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return activated


def silu(x: Float32) -> Float32:
    """Return ``x * sigmoid(x)``."""
    activated: Float32 = x / (np.float32(1) + np.exp(-x))
    return activated


def relu2(x: Float32) -> Float32:
    """Return the square of ``x`` where that is positive, else 0."""
    activated: Float32 = np.square(np.maximum(x, 0))
    return activated


def gelu_tanh(x: Float32) -> Float32:
    """Return GELU in its tanh approximation."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: Float32 = np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return activated


#: Activations by their names in configurations.
_ACTIVATIONS: dict[str, Callable[[Float32], Float32]] = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu2}


def scaled(x: Float32, factor: float) -> Float32:
    """Return ``x * factor``: ``x`` itself for a factor of 1."""
    return x if factor == 1 else x * np.float32(factor)


def project(projection: Projection, x: Float32) -> Float32:
    """Apply a linear map to ``x`` ``[..., in]`` and return ``[..., out]``, with all rows in one matrix product."""
    rows: Float32 = x.reshape(-1, x.shape[-1]) @ projection.weight.T
    if projection.bias is not None:
        rows += projection.bias
    return rows.reshape(*x.shape[:-1], -1)


def optional_norm(x: Float32, weights: NormWeights | None, norm: NormConfig | None) -> Float32:
    """Return :func:`rms_norm` or :func:`layer_norm`, or ``x`` itself without a norm."""
    if norm is None or weights is None:
        return x
    return layer_norm(x, weights, norm) if norm.centered else rms_norm(x, weights.weight, norm)


def layer_norm(x: Float32, weights: NormWeights, norm: NormConfig) -> Float32:
    """Subtract the mean of the last axis, divide by the standard deviation, and apply weight and bias."""
    normed = rms_norm(x - np.mean(x, axis=-1, keepdims=True), weights.weight, norm)
    return normed if weights.bias is None else normed + weights.bias


def rms_norm(x: Float32, weight: Float32, norm: NormConfig) -> Float32:
    """Divide by the root mean square of the last axis and multiply with the weight."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    factor = weight + np.float32(norm.weight_offset) if norm.weight_offset else weight
    normed: Float32 = x / np.sqrt(mean_square + np.float32(norm.epsilon)) * factor
    return normed
