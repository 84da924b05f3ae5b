"""Scalar multipliers and soft caps between the layers of some decoders."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def multiplied(graph: Graph, name: str, x: Any, factor: float) -> Any:
    """Return ``x * factor``, rounded once; the factor stays float32, since bfloat16 would be off by up to 0.4 %."""
    if factor == 1:
        return x
    wide = graph.cast(f"{name}/to_float32", x, "float32")
    product = graph.elementwise(name, wide, "PROD", graph.scalar(f"{name}/factor", factor, "float32", len(x.shape)))
    return graph.cast(f"{name}/round", product, graph.tensorrt.dtype_name(x.dtype))


def softcapped(graph: Graph, name: str, x: Any, softcap: float | None) -> Any:
    """Return ``softcap * tanh(x / softcap)`` of a float32 tensor; ``x`` itself without a softcap."""
    if softcap is None:
        return x
    cap = graph.scalar(f"{name}/softcap", softcap, "float32", len(x.shape))
    tanh = graph.op(f"{name}/tanh", "activation", graph.elementwise(f"{name}/divide", x, "DIV", cap), graph.trt.ActivationType.TANH)
    return graph.elementwise(f"{name}/capped", tanh, "PROD", cap)
