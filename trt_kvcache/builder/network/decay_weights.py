"""Decay of the state between two tokens, from sums of the logarithms of decays."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.sizes import Size, arange

#: The logarithm of no weight at all.
_NOTHING = -1e30


def decay_weights(graph: Graph, name: str, rows_since: Any, columns_since: Any, rows: Size, offset: int, *, columns: Size = None) -> Any:
    """Return ``exp(rows_since[i] - columns_since[j])`` for ``j <= i - offset``, else 0: ``[..., rows, columns]`` float32.

    ``rows_since`` ``[..., rows, 1]`` and ``columns_since`` ``[..., columns, 1]`` are sums of logarithms of decays.
    """
    rank = len(rows_since.shape)
    swapped = graph.shuffle(f"{name}/columns", columns_since, first_transpose=(*range(rank - 2), rank - 1, rank - 2))
    difference = graph.elementwise(f"{name}/difference", rows_since, "SUB", swapped)
    is_before = _is_before(graph, name, rows, rows if columns is None else columns, offset, rank)
    nothing = graph.scalar(f"{name}/nothing", _NOTHING, "float32", rank)
    return exp(graph, f"{name}/exp", graph.op(f"{name}/visible", "select", is_before, difference, nothing))


def running_sum(graph: Graph, name: str, x: Any, rows: Size, *, exclusive: bool) -> Any:
    """Return the sums of rows of ``x`` ``[..., rows, n]`` float32, as a product with a triangle of ones.

    Older releases of TensorRT have no layer for it. An exclusive sum ends before its row.
    """
    plain = graph.trt.MatrixOperation.NONE
    ones = graph.cast(f"{name}/ones", _is_before(graph, name, rows, rows, int(exclusive), len(x.shape)), "float32")
    return graph.op(name, "matrix_multiply", ones, plain, x, plain)


def _is_before(graph: Graph, name: str, rows: Size, columns: Size, offset: int, rank: int) -> Any:
    """Return whether ``j <= i - offset``, ``[1, ..., rows, columns]`` bool."""
    row = arange(graph, f"{name}/row", rows)
    column = row if columns is rows else arange(graph, f"{name}/column", columns)
    if not offset:
        row = graph.elementwise(f"{name}/row_end", row, "SUM", graph.scalar(f"{name}/one", 1, "int32", 1))
    row, column = (
        graph.shuffle(f"{name}/{what}_index", one, reshape=(1,) * (rank - 2) + shape)
        for what, one, shape in (("row", row, (-1, 1)), ("column", column, (1, -1)))
    )
    return graph.elementwise(f"{name}/is_before", row, "GREATER", column)


def exp(graph: Graph, name: str, x: Any) -> Any:
    """Return the exponential of each element."""
    return graph.op(name, "unary", x, graph.trt.UnaryOperation.EXP)
