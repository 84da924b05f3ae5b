"""Self-attention over the cache: project, rotate, write the new rows, attend, project back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trt_kvcache.checkpoint import ModelConfig
from trt_kvcache.names import TensorNames
from trt_kvcache.network.decomposable import AttentionChoice
from trt_kvcache.network.graph import Graph
from trt_kvcache.network.kv_update import update_cache
from trt_kvcache.network.lengths import StepLengths
from trt_kvcache.network.linear import linear
from trt_kvcache.network.rms_norm import rms_norm
from trt_kvcache.network.rope import RopeTables, rotate
from trt_kvcache.network.weights import Weights


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What all attention layers of a network share.

    Parameters
    ----------
    model : ModelConfig
    names : TensorNames
    max_sequence_length : int
        S.
    lengths : StepLengths
    tables : RopeTables
    mask : ITensor ``[B, 1, s, S]`` bool, or None
        Only for the ``mask`` variant.
    """

    model: ModelConfig
    names: TensorNames
    max_sequence_length: int
    lengths: StepLengths
    tables: RopeTables
    mask: Any = None


def self_attention(graph: Graph, x: Any, weights: Weights, module: str, context: AttentionContext, choice: AttentionChoice) -> Any:
    """Apply the attention ``module`` to ``x`` ``[B, s, hidden]``; the shape stays."""
    model, lengths = context.model, context.lengths
    q = _heads(graph, x, weights, f"{module}.q_proj", model.num_attention_heads, model)
    k = _heads(graph, x, weights, f"{module}.k_proj", model.num_kv_heads, model)
    v = _heads(graph, x, weights, f"{module}.v_proj", model.num_kv_heads, model)
    if model.qk_norm:
        q = rms_norm(graph, q, weights, f"{module}.q_norm", epsilon=model.rms_norm_eps)
        k = rms_norm(graph, k, weights, f"{module}.k_norm", epsilon=model.rms_norm_eps)
    q = _scale(graph, f"{module}/q", rotate(graph, f"{module}/q", q, context.tables, lengths.position_ids), model.head_dim)
    k = graph.cast(f"{module}/k/to_{graph.dtype}", rotate(graph, f"{module}/k", k, context.tables, lengths.position_ids), graph.dtype)

    k_cache, v_cache = context.names.cache_pairs(choice.layer)
    shape = (model.num_kv_heads, context.max_sequence_length, model.head_dim)
    keys = update_cache(graph, cache=k_cache, shape=shape, rows=k, start_index=lengths.start_index)
    values = update_cache(graph, cache=v_cache, shape=shape, rows=v, start_index=lengths.start_index)

    mixed = _attend(graph, f"{module}/attend", q, keys, values, context, choice)
    width = model.num_attention_heads * model.head_dim
    merged = graph.shuffle(f"{module}/merge_heads", mixed, first_transpose=(0, 2, 1, 3), reshape=(0, 0, width))
    return linear(graph, merged, weights, f"{module}.o_proj", bias=model.o_bias)


def _heads(graph: Graph, x: Any, weights: Weights, module: str, heads: int, model: ModelConfig) -> Any:
    """Project ``[B, s, hidden]`` and split it into ``[B, heads, s, D]``."""
    y = linear(graph, x, weights, module, bias=model.qkv_bias)
    return graph.shuffle(f"{module}/split_heads", y, reshape=(0, 0, heads, model.head_dim), second_transpose=(0, 2, 1, 3))


def _scale(graph: Graph, name: str, q: Any, head_dim: int) -> Any:
    """Multiply float32 queries by ``1 / sqrt(D)``, then round: TensorRT's attention does not scale.

    A scale rounded to bfloat16 would shift near-tied logits.
    """
    factor = graph.scalar(f"{name}/scale_factor", 1.0 / math.sqrt(head_dim), "float32", 4)
    return graph.cast(f"{name}/to_{graph.dtype}", graph.elementwise(f"{name}/scale", q, "PROD", factor), graph.dtype)


def _attend(graph: Graph, name: str, q: Any, keys: Any, values: Any, context: AttentionContext, choice: AttentionChoice) -> Any:
    """Add the attention layer: queries ``[B, Hq, s, D]``, keys and values ``[B, H, S, D]``; returns ``[B, Hq, s, D]``.

    Native: row ``i`` of slot ``b`` sees the keys ``j <= key_lengths[b] - s + i``. Mask: the keys that the mask shows it;
    TensorRT multiplies the others with 0, so they must be finite.
    """
    native = choice.variant == "native"
    layer = _attention_layer(graph, name, q, keys, values, is_causal=native)
    if native:
        layer.key_value_lengths = context.lengths.key_lengths
    else:
        layer.mask = context.mask
    layer.decomposable = choice.decomposable
    return graph.result(layer)


def _attention_layer(graph: Graph, name: str, q: Any, keys: Any, values: Any, *, is_causal: bool) -> Any:
    """Add the bare layer. It is causal or masked, never both: TensorRT would drop the mask."""
    trt = graph.trt
    softmax = trt.AttentionNormalizationOp.SOFTMAX
    if not graph.tensorrt.has_native_attention:  # knows a causal mask at the upper left only, which is not what is meant here
        return graph.layer(name, "attention", q, keys, values, softmax, False)
    kind = trt.CausalMaskKind.LOWER_RIGHT if is_causal else trt.CausalMaskKind.NONE
    return graph.layer(name, "attention_v2", q, keys, values, softmax, kind)
