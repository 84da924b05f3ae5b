"""Query scaling by position."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.model import QueryScaling


def query_factors(graph: Graph, scaling: QueryScaling, position_ids: Any, *, length: int, index: int = 0) -> Any:
    """Look up the factors ``[B, s, 1, 1]`` float32 of queries, once for all layers of a network that scale them so.

    The table is computed in float64 and rounded once.
    """
    name = f"query_scaling_{index}" if index else "query_scaling"
    positions = np.arange(length, dtype=np.float64)
    factors = 1 + scaling.beta * np.log1p(positions // scaling.period)
    table = graph.constant(f"{name}/factors", factors.astype(np.float32).reshape(-1, 1, 1))
    return graph.op(name, "gather", table, position_ids, 0)


def scale_queries(graph: Graph, name: str, q: Any, factors: Any, *, heads_first: bool) -> Any:
    """Multiply queries ``[B, Hq, s, D]``, or ``[B, s, Hq, D]``, by the factors of their positions."""
    if heads_first:
        factors = graph.shuffle(f"{name}/factors", factors, first_transpose=(0, 2, 1, 3))
    wide = graph.cast(f"{name}/to_float32", q, "float32")
    scaled = graph.elementwise(name, wide, "PROD", factors)
    return graph.cast(f"{name}/round", scaled, graph.tensorrt.dtype_name(q.dtype))
