"""Append new K or V rows to a cache, in place."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def update_cache(graph: Graph, *, cache: tuple[str, str], shape: tuple[int, int, int], rows: Any, start_index: Any) -> Any:
    """Add one cache to a network: an input, and the output that shares its memory."""
    name, present = cache
    before = graph.input(name, graph.dtype, (-1, *shape))
    after = graph.op(f"{present}/update", "kv_cache_update", before, rows, start_index, graph.trt.KVCacheMode.LINEAR)
    graph.output(after, present)
    return after
