"""Attention with soft-capped scores from plain layers: TensorRT's attention layer has no soft cap."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.projection import matmul_transposed
from trt_kvcache.builder.network.scalar_multiply import softcapped
from trt_kvcache.model import AttentionConfig

#: The score of a key that is not seen: its weight is 0.
_UNSEEN = -1e30


def softcapped_attention(graph: Graph, name: str, q: Any, keys: Any, values: Any, mask: Any, mixer: AttentionConfig) -> Any:
    """Attend with scores ``softcap * tanh(q k / softcap)``; q ``[B, Hq, s, D]`` is scaled, keys and values are the cache.

    All S scores are written to memory. Masked rows of the cache must be finite, since they are multiplied by 0.
    """
    length = keys.shape[2]
    rows = graph.shuffle(f"{name}/rows", q, reshape=(0, mixer.num_kv_heads, -1, mixer.head_dim))
    scores = graph.cast(f"{name}/to_float32", matmul_transposed(graph, f"{name}/scores", rows, keys), "float32")
    by_head = graph.shuffle(f"{name}/by_head", scores, reshape=(0, mixer.num_kv_heads, mixer.group, -1, length))
    capped = softcapped(graph, name, by_head, mixer.softcap)
    seen = graph.shuffle(f"{name}/mask", mask, reshape=(0, 1, 1, -1, length))
    visible = graph.op(f"{name}/visible", "select", seen, capped, graph.scalar(f"{name}/unseen", _UNSEEN, "float32", 5))
    softmax = graph.layer(f"{name}/softmax", "softmax", visible)
    softmax.axes = 1 << 4  # the keys
    weights = graph.cast(f"{name}/to_{graph.dtype}", graph.result(softmax), graph.dtype)
    weights = graph.shuffle(f"{name}/weights", weights, reshape=(0, mixer.num_kv_heads, -1, length))
    plain = graph.trt.MatrixOperation.NONE
    mixed = graph.op(f"{name}/mix", "matrix_multiply", weights, plain, values, plain)
    return graph.shuffle(f"{name}/heads", mixed, reshape=(0, mixer.num_heads, -1, mixer.head_dim))
