"""Append new K or V rows to a cache, in place."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def update_cache(graph: Graph, *, cache: tuple[str, str], shape: tuple[int, int, int], rows: Any, start_index: Any) -> Any:
    """Add one cache to a network: an input, and the output that shares its memory.

    Row ``i`` of slot ``b`` is written to token ``start_index[b] + i``. TensorRT ignores rows beyond S without an error, so whoever sets
    the start index must check that ``start + s <= S``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    cache : tuple of str
        Names of the input and of the output.
    shape : tuple of int
        ``(H, S, D)``.
    rows : ITensor [B, H, s, D]
        In the dtype of the model, which is that of the cache.
    start_index : ITensor [B] int32
        Tokens in the cache before the step.

    Returns
    -------
    ITensor [B, H, S, D]
        The cache after the update.

    Notes
    -----
    ``INetworkDefinition.add_kv_cache_update`` with ``KVCacheMode.LINEAR``.
    """
    name, present = cache
    before = graph.input(name, graph.dtype, (-1, *shape))
    after = graph.op(f"{present}/update", "kv_cache_update", before, rows, start_index, graph.trt.KVCacheMode.LINEAR)
    graph.output(after, present)
    return after
