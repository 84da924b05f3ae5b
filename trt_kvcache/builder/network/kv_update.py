"""Write new K or V rows into the cache, in place."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def update_cache(graph: Graph, *, cache: tuple[str, str], shape: tuple[int, int, int], rows: Any, start_index: Any) -> Any:
    """Add one cache: a network input, and the network output that shares its memory.

    Row ``i`` of slot ``b`` goes to token ``start_index[b] + i``. TensorRT ignores rows beyond S without a word; whoever
    sets the start must check that ``start + s <= S``.

    Parameters
    ----------
    cache : (str, str)
        Names of the input and of the output.
    shape : (int, int, int)
        ``(H, S, D)``.
    rows : ITensor ``[B, H, s, D]``
        In the dtype of the model, which is the dtype of the cache.
    start_index : ITensor ``[B]``, int32

    Returns
    -------
    ITensor ``[B, H, S, D]``
        The cache after the update.
    """
    name, present = cache
    before = graph.input(name, graph.dtype, (-1, *shape))
    after = graph.op(f"{present}/update", "kv_cache_update", before, rows, start_index, graph.trt.KVCacheMode.LINEAR)
    graph.output(after, present)
    return after
