"""Activation functions."""

from typing import Any

from trt_kvcache.builder.network.graph import Graph


def silu(graph: Graph, name: str, x: Any) -> Any:
    """Return ``x * sigmoid(x)``."""
    sigmoid = graph.op(f"{name}/sigmoid", "activation", x, graph.trt.ActivationType.SIGMOID)
    return graph.elementwise(f"{name}/silu", x, "PROD", sigmoid)


def gelu_tanh(graph: Graph, name: str, x: Any) -> Any:
    """Return GELU in its approximation by tanh."""
    return graph.op(f"{name}/gelu", "activation", x, graph.trt.ActivationType.GELU_TANH)


def relu2(graph: Graph, name: str, x: Any) -> Any:
    """Return ``max(x, 0) ** 2``."""
    positive = graph.op(f"{name}/relu", "activation", x, graph.trt.ActivationType.RELU)
    return graph.elementwise(f"{name}/relu2", positive, "PROD", positive)


#: Activations of MLPs and gates by their names in configurations.
ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu2}


def softplus(graph: Graph, name: str, x: Any) -> Any:
    """Return ``log(1 + exp(x))`` of a float32 tensor as ``max(x, 0) + 2 atanh(u / (u + 2))`` with ``u = exp(-abs(x))``.

    TensorRT's activation overflows for large elements, and loses small results, such as time steps.
    """
    unary, rank = graph.trt.UnaryOperation, len(x.shape)
    negative = graph.op(f"{name}/negative", "unary", graph.op(f"{name}/abs", "unary", x, unary.ABS), unary.NEG)
    small = graph.op(f"{name}/exp", "unary", negative, unary.EXP)
    shifted = graph.elementwise(f"{name}/shift", small, "SUM", graph.scalar(f"{name}/two", 2, "float32", rank))
    half = graph.op(f"{name}/atanh", "unary", graph.elementwise(f"{name}/ratio", small, "DIV", shifted), unary.ATANH)
    tail = graph.elementwise(f"{name}/log1p", half, "SUM", half)
    positive = graph.elementwise(f"{name}/positive", x, "MAX", graph.scalar(f"{name}/zero", 0, "float32", rank))
    return graph.elementwise(f"{name}/softplus", positive, "SUM", tail)
