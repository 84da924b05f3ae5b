"""Sizes that are known at run time only, as tensors of a network, and layers that take them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph

#: A size: a number, or an ITensor [1] int64.
Size = Any


def size(graph: Graph, name: str, tensor: Any, axis: int) -> Any:
    """Return a size of a tensor as ``[1]`` int64 on the host: TensorRT computes sizes before it enqueues a layer."""
    shape = graph.op(f"{name}/shape", "shape", tensor)
    return graph.op(f"{name}/size", "slice", shape, (axis,), (1,), (1,))


def join(graph: Graph, name: str, sizes: Sequence[Size]) -> Any:
    """Return a shape ``[n]`` int64 of sizes, each an int or ``[1]`` int64."""
    tensors = [
        graph.constant(f"{name}/size_{index}", np.array([one], np.int64)) if isinstance(one, int) else one
        for index, one in enumerate(sizes)
    ]
    return graph.op(f"{name}/sizes", "concatenation", tensors)


def combined(graph: Graph, name: str, left: Size, operation: str, right: Size) -> Any:
    """Return the result of an ``ElementWiseOperation``, such as ``"FLOOR_DIV"``, of two sizes."""
    sides = (
        graph.constant(f"{name}/{side}", np.array([one], np.int64)) if isinstance(one, int) else one
        for side, one in (("left", left), ("right", right))
    )
    first, second = sides
    return graph.elementwise(name, first, operation, second)


def reshape(
    graph: Graph,
    name: str,
    x: Any,
    sizes: Sequence[Size],
    *,
    first_transpose: Sequence[int] | None = None,
    second_transpose: Sequence[int] | None = None,
) -> Any:
    """Reshape a tensor to a shape of which more than one size is known at run time only."""
    shuffle = graph.layer(name, "shuffle", x)
    if first_transpose is not None:
        shuffle.first_transpose = tuple(first_transpose)
    if second_transpose is not None:
        shuffle.second_transpose = tuple(second_transpose)
    shuffle.set_input(1, join(graph, name, sizes))
    shuffle.zero_is_placeholder = False
    return graph.result(shuffle)


def part(graph: Graph, name: str, x: Any, starts: Sequence[Size], sizes: Sequence[Size]) -> Any:
    """Return a slice of a tensor."""
    rank = len(starts)
    known = tuple(start if isinstance(start, int) else 0 for start in starts)
    section = graph.layer(name, "slice", x, known, (1,) * rank, (1,) * rank)
    if known != tuple(starts):
        section.set_input(1, join(graph, f"{name}/start", starts))
    section.set_input(2, join(graph, name, sizes))
    return graph.result(section)


def padded(graph: Graph, name: str, x: Any, sizes: Sequence[Size]) -> Any:
    """Return a tensor padded with zeros at the end of each dimension."""
    rank = len(x.shape)
    section = graph.layer(name, "slice", x, (0,) * rank, (1,) * rank, (1,) * rank)
    section.mode = graph.trt.SampleMode.FILL
    section.set_input(2, join(graph, name, sizes))
    section.set_input(4, graph.scalar(f"{name}/zero", 0, graph.tensorrt.dtype_name(x.dtype), 0))
    return graph.result(section)


def arange(graph: Graph, name: str, count: Any) -> Any:
    """Return the numbers ``0 .. count - 1``."""
    fill = graph.layer(name, "fill", (1,), graph.trt.FillOperation.LINSPACE, graph.tensorrt.data_type("int32"))
    fill.set_input(0, count)
    fill.set_input(1, graph.scalar(f"{name}/first", 0, "int32", 0))
    fill.set_input(2, graph.constant(f"{name}/step", np.array([1], np.int32)))
    return graph.result(fill)


def columns(graph: Graph, name: str, x: Any, counts: Sequence[int]) -> list[Any]:
    """Split ``x`` ``[B, s, n]`` into tensors of ``counts`` columns."""
    tokens = [size(graph, f"{name}/{what}", x, axis) for axis, what in enumerate(("slots", "width"))]
    starts = np.cumsum([0, *counts]).tolist()
    return [
        part(graph, f"{name}/{index}", x, (0, 0, start), (*tokens, count))
        for index, (start, count) in enumerate(zip(starts, counts, strict=False))
    ]
