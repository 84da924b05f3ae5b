"""Append new K or V rows to a cache, in place."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def update_cache(graph: Graph, *, cache: tuple[str, str], shape: tuple[int, int, int], rows: Any, start_index: Any) -> Any:
    """Add one cache: an input and the output ``[B, H, S, D]`` that shares its memory, with ``rows`` ``[B, H, s, D]`` written.

    Rows start at ``start_index[b]``. TensorRT ignores rows beyond S without an error: the caller checks that they fit.
    """
    name, present = cache
    before = graph.input(name, graph.dtype, (-1, *shape))
    after = graph.op(f"{present}/update", "kv_cache_update", before, rows, start_index, graph.trt.KVCacheMode.LINEAR)
    graph.output(after, present)
    return after
