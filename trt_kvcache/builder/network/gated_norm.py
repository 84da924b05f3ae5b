"""A gate, with RMSNorm over groups of columns or without, after the scan of layers with states."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.activations import silu
from trt_kvcache.builder.network.graph import Graph


def gated(graph: Graph, name: str, x: Any, gate: Any) -> Any:
    """Multiply ``x`` ``[B, s, columns]`` by SiLU of the gate. Computed in float32."""
    wide, opened = (graph.cast(f"{name}/{what}/to_float32", one, "float32") for what, one in (("x", x), ("gate", gate)))
    product = graph.elementwise(f"{name}/gated", wide, "PROD", silu(graph, f"{name}/gate", opened))
    return graph.cast(f"{name}/round", product, graph.dtype)


def gated_norm(
    graph: Graph, name: str, x: Any, gate: Any, weight: np.ndarray[Any, Any], *, group_size: int, gate_first: bool, epsilon: float
) -> Any:
    """Apply RMSNorm to groups of columns of ``x`` ``[B, s, columns]``, and multiply by SiLU of the gate before or after it.

    ``weight`` has all columns, or one group that all share. Computed in float32.
    """
    columns = x.shape[2]
    wide, opened = (graph.cast(f"{name}/{what}/to_float32", one, "float32") for what, one in (("x", x), ("gate", gate)))
    factor = silu(graph, f"{name}/gate", opened)
    if gate_first:
        wide = graph.elementwise(f"{name}/gated", wide, "PROD", factor)
    groups = graph.shuffle(f"{name}/groups", wide, reshape=(0, 0, -1, group_size))
    square = graph.elementwise(f"{name}/square", groups, "PROD", groups)
    mean = graph.op(f"{name}/mean", "reduce", square, graph.trt.ReduceOperation.AVG, 1 << 3, True)
    shifted = graph.elementwise(f"{name}/add_epsilon", mean, "SUM", graph.scalar(f"{name}/epsilon", epsilon, "float32", 4))
    root = graph.op(f"{name}/sqrt", "unary", shifted, graph.trt.UnaryOperation.SQRT)
    normed = graph.elementwise(f"{name}/divide", groups, "DIV", root)
    own = graph.constant(f"{name}/weight", weight.astype(np.float32).reshape(1, 1, -1, group_size))
    scaled = graph.shuffle(f"{name}/columns", graph.elementwise(f"{name}/scale", normed, "PROD", own), reshape=(0, 0, columns))
    if not gate_first:
        scaled = graph.elementwise(f"{name}/gated", scaled, "PROD", factor)
    return graph.cast(f"{name}/round", scaled, graph.dtype)
