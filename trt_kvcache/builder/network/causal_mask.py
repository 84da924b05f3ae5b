"""The explicit masks of the ``mask`` variant of attention: causal, or sliding-window."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph


def causal_masks(graph: Graph, *, position_ids: Any, max_sequence_length: int, windows: Iterable[int | None]) -> Mapping[int | None, Any]:
    """Add a mask ``[B, 1, s, S]`` bool for each window: true where a token attends to the key.

    A window is the number of keys that a token attends to, itself included; None for all keys up to its own.
    """
    keys = graph.constant("mask/keys", np.arange(max_sequence_length, dtype=np.int32).reshape(1, 1, 1, -1))
    layer = graph.layer("mask/positions", "shuffle", position_ids)
    layer.reshape_dims = (0, 1, -1, 1)
    positions = graph.result(layer)
    later = graph.elementwise("mask/later", keys, "GREATER", positions)
    causal = graph.op("mask/causal", "unary", later, graph.trt.UnaryOperation.NOT)
    masks = {}
    for window in dict.fromkeys(windows):
        masks[window] = causal
        if window is not None:
            name = f"mask/window_{window}"
            outside = graph.elementwise(f"{name}/outside", positions, "SUB", graph.scalar(f"{name}/size", window, "int32", 4))
            recent = graph.elementwise(f"{name}/recent", keys, "GREATER", outside)
            masks[window] = graph.elementwise(name, causal, "AND", recent)
    return masks
