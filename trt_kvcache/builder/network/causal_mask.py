"""The explicit causal mask of the ``mask`` variant of attention."""

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph


def causal_mask(graph: Graph, *, position_ids: Any, max_sequence_length: int) -> Any:
    """Add the mask that shows each new token the keys up to its own position.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    position_ids : ITensor [B, s] int32
        Position of each new token.
    max_sequence_length : int
        Tokens that a slot can hold, S.

    Returns
    -------
    ITensor [B, 1, s, S] bool
        True where the token sees the key.
    """
    keys = graph.constant("mask/keys", np.arange(max_sequence_length, dtype=np.int32).reshape(1, 1, 1, -1))
    layer = graph.layer("mask/positions", "shuffle", position_ids)
    layer.reshape_dims = (0, 1, -1, 1)
    later = graph.elementwise("mask/later", keys, "GREATER", graph.result(layer))
    return graph.op("mask/causal", "unary", later, graph.trt.UnaryOperation.NOT)
