"""Embedding tables: constants, and the rows of token ids in them."""

from collections.abc import Sequence
from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.builder.network.projection import dequantized
from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.model.weight_parts import WeightPart

#: Elements that a tensor of TensorRT may have: many of its kernels compute offsets in 32 bits.
MAX_ELEMENTS = 2**31 - 1


def embedding_table(graph: Graph, weights: Weights, stored: str, constant: str, part: WeightPart | None = None) -> Any:
    """Add the weight ``stored`` ``[vocab, n]``, or rows of it, as a constant.

    A quantized table stays packed, with offsets subtracted from its values, unless the difference is no int8.
    """
    table = weights.matrix(stored, part) if part is not None else weights.matrix(stored)
    plain = table.with_integer_values() if isinstance(table, PackedWeight) else None
    if plain is not None:
        return dequantized(graph, constant.removesuffix(".weight"), plain)
    return graph.constant(constant, weights(stored) if part is None else weights(stored, part.index))


def split_table(graph: Graph, weights: Weights, name: str, shape: tuple[int, int]) -> list[Any]:
    """Add a table as constants of consecutive rows: one, unless it has more elements than a tensor may have."""
    rows, width = shape
    height = MAX_ELEMENTS // width
    if height >= rows:
        return [embedding_table(graph, weights, name, name)]
    ranges = [slice(first, min(first + height, rows)) for first in range(0, rows, height)]
    parts = [WeightPart(tensor=name, shape=(one.stop - one.start, width), rows=(one,), tensor_rows=rows) for one in ranges]
    module = name.removesuffix(".weight")
    return [embedding_table(graph, weights, name, f"{module}/{index}.weight", part) for index, part in enumerate(parts)]


def look_up(graph: Graph, name: str, tables: Sequence[Any], ids: Any) -> Any:
    """Return the rows ``[B, s, n]`` of token ids ``[B, s]`` int32 in a table whose consecutive rows are ``tables``."""
    first, *others = tables
    if not others:
        return graph.op(name, "gather", first, ids, 0)
    start = first.shape[0]
    found = graph.op(f"{name}/0", "gather", first, bounded(graph, f"{name}/0", ids, "MIN", start - 1), 0)
    for index, table in enumerate(others, 1):
        found = replaced(graph, f"{name}/{index}", found, table, ids, start=start)
        start += table.shape[0]
    return found


def replaced(graph: Graph, name: str, found: Any, table: Any, ids: Any, *, start: int) -> Any:
    """Return rows ``[B, s, n]`` with those of ``table`` in the places of ids from ``start`` on."""
    inside = bounded(graph, f"{name}/last", bounded(graph, f"{name}/first", ids, "MAX", start), "MIN", start + table.shape[0] - 1)
    local = graph.elementwise(f"{name}/ids", inside, "SUB", graph.scalar(f"{name}/start", start, "int32", 2))
    is_later = graph.elementwise(f"{name}/is_later", ids, "GREATER", graph.scalar(f"{name}/before", start - 1, "int32", 2))
    column = graph.shuffle(f"{name}/column", is_later, reshape=(0, 0, 1))
    return graph.op(f"{name}/select", "select", column, graph.op(name, "gather", table, local, 0), found)


def bounded(graph: Graph, name: str, ids: Any, operation: str, limit: int) -> Any:
    """Return ``"MIN"`` or ``"MAX"`` of ids ``[B, s]`` and a limit."""
    return graph.elementwise(f"{name}/{operation.lower()}", ids, operation, graph.scalar(f"{name}/limit", limit, "int32", 2))
