"""The decoder in NumPy, apart from caches: pure functions over float32 arrays.

Everything is accumulated in float32, whatever the dtype of weights and cache. Shapes: A slots, s new tokens per slot,
Hq query heads, H key-value heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trt_kvcache.model import (
    AttentionConfig,
    ClampedSwiGLU,
    Eagle3InputConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RoutedMlpConfig,
    RouterConfig,
)
from trt_kvcache.reference.activations import ACTIVATIONS, clamped_swiglu, sigmoid
from trt_kvcache.reference.adapters import AdaptedProjection
from trt_kvcache.reference.attention import LayerAttention, RotatedBeforeNorms, softcapped
from trt_kvcache.reference.blas_threads import one_blas_thread
from trt_kvcache.reference.router import route
from trt_kvcache.reference.weights import DecoderLayerWeights, DecoderWeights, Float32, MergeWeights, NormWeights, Projection

#: Function of the weights of a recurrent layer and its normalised input ``[A, s, hidden]``; returns ``[A, s, hidden]``.
LayerRecurrence = Callable[[DecoderLayerWeights, Float32], Float32]


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Operations of a layer on its cache: attention over K and V, and a recurrence; None for what it does not have."""

    attention: LayerAttention | None
    recurrence: LayerRecurrence | None


def decoder_step(
    config: ModelConfig,
    weights: DecoderWeights,
    caches: Sequence[LayerCache],
    input_ids: npt.NDArray[np.int32],
    last: npt.NDArray[np.int32],
    dtype: str,
    rows: npt.NDArray[Any] | None = None,
    *,
    hidden_inputs: Float32 | None = None,
    hidden_states: Float32 | None = None,
    hidden_layers: Sequence[int] = (),
    reduction: Float32 | None = None,
    clusters: npt.NDArray[np.int64] | None = None,
) -> Float32:
    """Return the logits ``[A * m, vocab]`` of the tokens ``last [A, m]`` of the right-padded ``input_ids [A, s]``.

    ``rows``: of ids past the vocabulary. ``hidden_states`` are written, of ``hidden_layers``, or these times ``reduction``.
    """
    hidden = embedded(config, weights, input_ids, dtype, rows)
    mixer_input: Float32 | None = None
    kept = hidden_states if reduction is None else np.empty((*input_ids.shape, reduction.shape[1]), np.float32)
    if weights.merge is not None and hidden_inputs is not None:
        if config.eagle3_input is not None:
            hidden, mixer_input = eagle3_inputs(config.eagle3_input, weights.merge, hidden, hidden_inputs)
        elif config.merge_norm is not None:
            hidden = merged(config.merge_norm, weights.merge, hidden, hidden_inputs)
    if weights.assistant is not None and hidden_inputs is not None:
        hidden = project(Projection(weights.assistant.pre_projection, None), np.concatenate([hidden, hidden_inputs], axis=-1))
    with one_blas_thread(input_ids.size, _largest_weight(weights)):
        inputs = per_layer_inputs(config, weights, input_ids, hidden, dtype)
        for index, (layer, layer_weights, cache, own) in enumerate(zip(config.layers, weights.layers, caches, inputs, strict=True)):
            keep(hidden, index, hidden_layers, kept)
            hidden = decoder_layer(layer, layer_weights, cache, hidden, own, mixer_input)
            mixer_input = None
    keep(hidden, config.num_layers, hidden_layers, kept)
    if hidden_states is not None and kept is not None:
        if not hidden_layers:
            normed = optional_norm(hidden, weights.final_norm, config.final_norm)
            assistant = weights.assistant
            hidden_states[...] = normed if assistant is None else project(Projection(assistant.post_projection, None), normed)
        elif reduction is not None:
            with one_blas_thread(input_ids.size, reduction.size):
                hidden_states[...] = project(Projection(reduction, None), kept)
    wanted = hidden[np.arange(len(last))[:, None], last].reshape(-1, config.hidden_size)
    with one_blas_thread(len(wanted), weights.head.size):
        normed = optional_norm(wanted, weights.final_norm, config.final_norm)
        logits: Float32 = normed @ weights.head.T
    if clusters is not None:
        logits = of_nearest_clusters(config, weights, normed, logits, clusters)
    logits = logits if config.logits_divisor == 1 else logits / np.float32(config.logits_divisor)
    return logits if config.final_softcap is None else softcapped(logits, config.final_softcap)


def of_nearest_clusters(
    config: ModelConfig, weights: DecoderWeights, normed: Float32, logits: Float32, clusters: npt.NDArray[np.int64]
) -> Float32:
    """Return the logits ``[n, vocab]`` of the clusters whose centroids are nearest to ``normed [n, hidden]``, -inf for other tokens."""
    own = config.assistant_input
    assert own is not None
    assert own.clusters is not None
    assert weights.assistant is not None
    assert weights.assistant.centroids is not None
    order = np.argsort(-(normed @ weights.assistant.centroids.T), axis=-1, kind="stable")
    tokens = clusters[order[:, : own.clusters.chosen]].reshape(len(normed), -1)
    found = np.full_like(logits, -np.inf)
    np.put_along_axis(found, tokens, np.take_along_axis(logits, tokens, axis=-1), axis=-1)
    return found


def keep(hidden: Float32, index: int, layers: Sequence[int], states: Float32 | None) -> None:
    """Write the residual stream before layer ``index`` to its places in ``states``, which has those before ``layers`` side by side."""
    for place, layer in enumerate(layers):
        if layer == index and states is not None:
            states[..., place * hidden.shape[-1] : (place + 1) * hidden.shape[-1]] = hidden


def embedded(
    config: ModelConfig, weights: DecoderWeights, input_ids: npt.NDArray[np.int32], dtype: str, rows: npt.NDArray[Any] | None
) -> Float32:
    """Return the input ``[A, s, hidden]`` of the first layer. ``rows`` are taken as they are, without the embedding multiplier."""
    if rows is None:
        return scaled(weights.embedding[input_ids], config.embedding_factor(dtype))
    past = input_ids - config.vocab_size
    is_row = past >= 0
    hidden = scaled(weights.embedding[np.where(is_row, 0, input_ids)], config.embedding_factor(dtype))
    hidden[is_row] = rows[past[is_row]].astype(np.float32)
    return hidden


def merged(norm: NormConfig, weights: MergeWeights, embedding: Float32, hidden: Float32) -> Float32:
    """Return the input ``[A, s, hidden]`` of an MTP head's layer, of embeddings and hidden states of the same shape."""
    halves = [rms_norm(embedding, weights.embedding_norm, norm), rms_norm(hidden, weights.hidden_norm, norm)]
    return project(Projection(weights.projection, None), np.concatenate(halves, axis=-1))


def eagle3_inputs(config: Eagle3InputConfig, weights: MergeWeights, embedding: Float32, states: Float32) -> tuple[Float32, Float32]:
    """Return the residual stream of an EAGLE-3 head ``[A, s, hidden]`` and the input of its attention ``[A, s, 2 * hidden]``.

    ``states [A, s, hidden]``: reduced hidden states of the model, or those of the head.
    """
    normed = rms_norm(states, weights.hidden_norm, config.norm)
    halves = [rms_norm(embedding, weights.embedding_norm, config.norm), normed]
    return normed if config.adds_normalised else states, np.concatenate(halves, axis=-1)


def per_layer_inputs(
    config: ModelConfig, weights: DecoderWeights, input_ids: npt.NDArray[np.int32], hidden: Float32, dtype: str
) -> Sequence[Float32 | None]:
    """Return the inputs ``[A, s, size]`` of each layer from the per-layer embedding. ``hidden``: input of the first layer."""
    embedding, stored = config.per_layer_embedding, weights.per_layer
    if embedding is None or stored is None:
        return [None] * config.num_layers
    sizes = (*input_ids.shape, config.num_layers, embedding.size)
    projected = (project(stored.projection, hidden) * np.float32(config.hidden_size**-0.5)).reshape(sizes)
    projected = optional_norm(projected, stored.norm, embedding.norm)
    rows = scaled(stored.embedding[input_ids], embedding.factor(dtype)).reshape(sizes)
    return list(np.moveaxis((projected + rows) * np.float32(0.5**0.5), 2, 0))


def _largest_weight(weights: DecoderWeights) -> int:
    """Return the size of the first layer's largest weight: the others are about as large."""
    return max([weight.size for layer in weights.layers[:1] for weight in layer.parts.values()], default=0)


def decoder_layer(
    config: LayerConfig,
    weights: DecoderLayerWeights,
    cache: LayerCache,
    hidden: Float32,
    per_layer: Float32 | None = None,
    mixer_input: Float32 | None = None,
) -> Float32:
    """Apply one decoder layer to ``hidden [A, s, hidden]``, which is not changed. ``per_layer``: its per-layer input ``[A, s, size]``.

    ``mixer_input``: in place of the norm of ``hidden``.
    """
    normed = optional_norm(hidden, weights.input_norm, config.input_norm) if mixer_input is None else mixer_input
    if config.parallel_mixer is not None:
        assert cache.recurrence is not None
        hidden = hidden + scaled(cache.recurrence(weights, normed), config.parallel_mixer_multiplier)
    if config.mixer is not None:
        if isinstance(config.mixer, AttentionConfig):
            assert cache.attention is not None
            mixed = self_attention(config.mixer, weights, cache.attention, normed)
        else:
            assert cache.recurrence is not None
            mixed = cache.recurrence(weights, normed)
        mixed = optional_norm(mixed, weights.mixer_output_norm, config.mixer_output_norm)
        hidden = hidden + scaled(mixed, config.residual_multiplier)
    if config.mlp is not None:
        normed = normed if config.parallel else optional_norm(hidden, weights.mlp_norm, config.mlp_norm)
        changed = routed_mlp(config.mlp, weights, normed) if isinstance(config.mlp, RoutedMlpConfig) else mlp(config.mlp, weights, normed)
        changed = optional_norm(changed, weights.mlp_output_norm, config.mlp_output_norm)
        hidden = hidden + scaled(changed, config.mlp_factor)
    if config.per_layer_input is not None and per_layer is not None:
        gate = ACTIVATIONS[config.per_layer_input.activation](project(weights.projection("per_layer_gate"), hidden))
        change = project(weights.projection("per_layer_projection"), gate * per_layer)
        hidden = hidden + optional_norm(change, weights.norm("per_layer_norm"), config.per_layer_input.output_norm)
    return hidden * weights["output_scale"] if config.output_scale else hidden


def self_attention(config: AttentionConfig, layer: DecoderLayerWeights, attention: LayerAttention, hidden: Float32) -> Float32:
    """Apply the self-attention of one layer to its normalised input ``[A, s, hidden]``, with the output projection."""
    hidden = scaled(hidden, config.input_multiplier)
    if config.stores_kv:
        q, *new = _qkv(config, layer, attention, hidden)
        attended = attention(q, (new[0], new[1]))
    else:
        attended = attention(_queries(config, layer, hidden), None)
    attended = attended.reshape(*attended.shape[:2], -1)
    if config.output_gate:
        attended = attended * sigmoid(project(layer.projection("output_gate"), hidden))
    return project(layer.o, attended)


def _queries(config: AttentionConfig, layer: DecoderLayerWeights, hidden: Float32) -> Float32:
    """Return q ``[A, s, Hq, D]`` after its norm, for a layer that reads K and V of another one."""
    q, qk_norm = project(layer.q, hidden), config.qk_norm
    spans_all = qk_norm is not None and qk_norm.over == "full"
    heads = q.reshape(*q.shape[:2], -1, q.shape[2] if spans_all else config.head_dim)
    normed = heads if qk_norm is None else optional_norm(heads, layer.q_norm, qk_norm.norm)
    return normed.reshape(*q.shape[:2], -1, config.head_dim)


def _qkv(
    config: AttentionConfig, layer: DecoderLayerWeights, attention: LayerAttention, hidden: Float32
) -> tuple[Float32, Float32, Float32]:
    """Return q, k and v ``[A, s, heads, D]`` after their norms."""
    q, k = project(layer.q, hidden), project(layer.k, hidden)
    v = k if config.values_are_keys else project(layer.v, hidden)
    over = None if config.qk_norm is None else config.qk_norm.over
    if over == "full":
        q, k = qk_norm(config, layer, q, k)
    q, k, v = [part.reshape(*part.shape[:2], -1, config.head_dim) for part in (q, k, v)]
    if config.rotates_before_norm:
        q, k = cast(RotatedBeforeNorms, attention).rotated(q, k)
    if over == "head":
        q, k = qk_norm(config, layer, q, k)
    if config.v_norm_epsilon is not None:
        v = normalised(v, config.v_norm_epsilon)
    return q, k, v


def qk_norm(config: AttentionConfig, layer: DecoderLayerWeights, q: Float32, k: Float32) -> tuple[Float32, Float32]:
    """Normalise q and k over their last axis: one head, or all of them."""
    assert config.qk_norm is not None
    norm = config.qk_norm.norm
    return optional_norm(q, layer.q_norm, norm), optional_norm(k, layer.k_norm, norm)


def mlp(config: MlpConfig, layer: DecoderLayerWeights, hidden: Float32, role: str = "{}") -> Float32:
    """Apply an MLP to ``hidden`` ``[..., hidden]``; the result has the same shape. ``role``: names of its projections in the layer."""

    def product(name: str, x: Float32) -> Float32:
        return project(layer.projection(role.format(name)), x)

    activation, up = config.activation, product("up", hidden)
    if isinstance(activation, ClampedSwiGLU):
        return product("down", clamped_swiglu(activation, product("gate", hidden), up))
    if not config.gated:
        return product("down", ACTIVATIONS[activation](up))
    return product("down", ACTIVATIONS[activation](scaled(product("gate", hidden), config.gate_multiplier)) * up)


def routed_mlp(config: RoutedMlpConfig, layer: DecoderLayerWeights, hidden: Float32) -> Float32:
    """Apply the chosen experts of each token, and the shared one, to ``hidden`` ``[..., hidden]``; the result has the same shape."""
    rows, norm = hidden.reshape(-1, hidden.shape[-1]), config.branch_norm
    logits = project(layer.projection("router"), router_input(config.router, layer, rows))
    experts, weights = route(config.router, logits, layer.get("choice_bias"), layer.get("expert_scale"))
    taken = optional_norm(rows, layer.norm("experts_norm"), norm)
    taken = taken if config.latent_size is None else project(layer.projection("latent_in"), taken)
    result = np.zeros_like(taken)
    for expert in np.unique(experts).tolist():
        tokens, places = np.nonzero(experts == expert)  # a token has an expert once, so no row is added twice
        result[tokens] += weights[tokens, places, None] * mlp(config.expert, layer, taken[tokens], f"expert_{{}}.{expert}")
    if config.latent_size is not None:
        result = project(layer.projection("latent_out"), result)
    result = optional_norm(result, layer.norm("experts_output_norm"), norm)
    if config.shared is not None:
        shared = mlp(config.shared, layer, optional_norm(rows, layer.norm("shared_norm"), norm), "shared_{}")
        shared = optional_norm(shared, layer.norm("shared_output_norm"), norm)
        result += shared * sigmoid(project(layer.projection("shared_expert_gate"), rows)) if config.shared_gate else shared
    return result.reshape(hidden.shape)


def router_input(config: RouterConfig, layer: DecoderLayerWeights, rows: Float32) -> Float32:
    """Return the input ``[n, hidden]`` of a router's projection: normalised and scaled, if the router says so."""
    if config.norm_epsilon is None:
        return rows
    scale: Float32 = layer["router_scale"] * np.float32(rows.shape[1] ** -0.5)
    return normalised(rows, config.norm_epsilon) * scale


def scaled(x: Float32, factor: float) -> Float32:
    """Return ``x * factor``: ``x`` itself for a factor of 1."""
    return x if factor == 1 else x * np.float32(factor)


def project(projection: Projection, x: Float32) -> Float32:
    """Apply a linear map to ``x`` ``[..., in]`` and return ``[..., out]``, with all rows in one matrix product."""
    rows: Float32 = x.reshape(-1, x.shape[-1]) @ projection.weight.T
    if projection.bias is not None:
        rows += projection.bias
    if isinstance(projection, AdaptedProjection):
        rows += projection.change(x.reshape(-1, x.shape[-1]))
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
    factor = weight + np.float32(norm.weight_offset) if norm.weight_offset else weight
    normed: Float32 = normalised(x, norm.epsilon) * factor
    return normed


def normalised(x: Float32, epsilon: float) -> Float32:
    """Divide by the root mean square of the last axis."""
    quotient: Float32 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return quotient
