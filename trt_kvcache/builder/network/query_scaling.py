"""Queries that are scaled by their position."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.model import QueryScaling


def query_factors(graph: Graph, name: str, scaling: QueryScaling, position_ids: Any, *, length: int) -> Any:
    """Look up the factors of queries.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Prefix of the layers' names.
    scaling : QueryScaling
        Which factor a position has.
    position_ids : ITensor [B, s] int32
        Position of each token.
    length : int
        Positions, S.

    Returns
    -------
    ITensor [B, s, 1, 1] float32
        The factor of each token, from a table that is computed in float64 and rounded once.
    """
    positions = np.arange(length, dtype=np.float64)
    factors = 1 + scaling.beta * np.log1p(positions // scaling.period)
    table = graph.constant(f"{name}/factors", factors.astype(np.float32).reshape(-1, 1, 1))
    return graph.op(f"{name}/factor", "gather", table, position_ids, 0)
