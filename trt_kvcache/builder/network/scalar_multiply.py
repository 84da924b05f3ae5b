"""Multipliers and soft caps: the numbers between the layers of some decoders."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def multiplied(graph: Graph, name: str, x: Any, factor: float) -> Any:
    """Return ``x * factor``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Prefix of the layers' names.
    x : ITensor
        What to multiply.
    factor : float
        A constant of the network in float32: rounded to bfloat16 it would be off by up to 0.4 %.

    Returns
    -------
    ITensor
        Of the shape and dtype of ``x``, rounded once; ``x`` itself for a factor of 1.
    """
    if factor == 1:
        return x
    wide = graph.cast(f"{name}/to_float32", x, "float32")
    product = graph.elementwise(name, wide, "PROD", graph.scalar(f"{name}/factor", factor, "float32", len(x.shape)))
    return graph.cast(f"{name}/round", product, graph.tensorrt.dtype_name(x.dtype))


def softcapped(graph: Graph, name: str, x: Any, softcap: float | None) -> Any:
    """Return ``softcap * tanh(x / softcap)``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Prefix of the layers' names.
    x : ITensor float32
        Scores or logits.
    softcap : float or None
        The cap, if there is one.

    Returns
    -------
    ITensor float32
        Of the shape of ``x``; ``x`` itself without a cap.
    """
    if softcap is None:
        return x
    cap = graph.scalar(f"{name}/softcap", softcap, "float32", len(x.shape))
    tanh = graph.op(f"{name}/tanh", "activation", graph.elementwise(f"{name}/divide", x, "DIV", cap), graph.trt.ActivationType.TANH)
    return graph.elementwise(f"{name}/capped", tanh, "PROD", cap)
