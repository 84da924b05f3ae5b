"""Products with a matrix ``[out, in]``, in the dtype of the model or packed."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.dtypes import numpy_dtype

#: A matrix: as it is, or packed.
Matrix = np.ndarray[Any, Any] | PackedWeight


def matmul_transposed(graph: Graph, name: str, x: Any, weight: Any) -> Any:
    """Return ``x weight^T``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    name : str
        Name of the layer.
    x : ITensor [..., in]
        The left operand.
    weight : ITensor [..., out, in]
        Of the rank of ``x``.

    Returns
    -------
    ITensor [..., out]
        The product over the last dimension of both, in their dtype.
    """
    plain, transposed = graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    return graph.op(name, "matrix_multiply", x, plain, weight, transposed)


def projection(graph: Graph, module: str, x: Any, weight: Matrix) -> Any:
    """Return ``x weight^T``.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    module : str
        Prefix of the layers' names.
    x : ITensor [..., in]
        In the dtype of the model.
    weight : ndarray [out, in] or PackedWeight
        The matrix.

    Returns
    -------
    ITensor [..., out]
        In the dtype of ``x``.

    Notes
    -----
    A packed matrix is a constant and ``INetworkDefinition.add_dequantize``. Of what a weight ``(code - offset) * scale`` has beside them,
    ``offset * scale`` is multiplied with the sums of the inputs of each block and subtracted; an order of inputs is a gather of ``x``.
    """
    rank = len(x.shape)
    if not isinstance(weight, PackedWeight):
        matrix = graph.constant(f"{module}.weight", weight.reshape((1,) * (rank - 2) + weight.shape))
        return matmul_transposed(graph, f"{module}/matmul", x, matrix)
    if weight.input_factor is not None:
        factor = weight.input_factor.astype(numpy_dtype(graph.dtype)).reshape((1,) * (rank - 1) + (-1,))
        x = graph.elementwise(f"{module}/scale_inputs", x, "PROD", graph.constant(f"{module}.input_factor", factor))
    if weight.input_order is not None:
        x = graph.op(f"{module}/order_inputs", "gather", x, graph.constant(f"{module}.input_order", weight.input_order), rank - 1)
    matrix = dequantized(graph, module, weight)
    if rank > 2:
        matrix = graph.shuffle(f"{module}/as_rank_{rank}", matrix, reshape=(1,) * (rank - 2) + weight.codes.shape)
    y = matmul_transposed(graph, f"{module}/matmul", x, matrix)
    if weight.offsets is None:
        return y
    return graph.elementwise(f"{module}/subtract_offsets", y, "SUB", _offset_product(graph, module, x, weight.offsets * weight.scales))


def dequantized(graph: Graph, module: str, weight: PackedWeight) -> Any:
    """Return the products of codes and scales of a packed matrix.

    Parameters
    ----------
    graph : Graph
        The network under construction.
    module : str
        Prefix of the layers' names.
    weight : PackedWeight
        The matrix. Its offsets, the order and the factors of its inputs are not applied.

    Returns
    -------
    ITensor [out, in]
        In the dtype of the model, rounded once: where that does not hold the scales exactly, products are float32 first.
    """
    narrow = weight.scales.astype(numpy_dtype(graph.dtype))
    is_exact = np.array_equal(narrow.astype(np.float32), weight.scales)
    dtype, scales = (graph.dtype, narrow) if is_exact else ("float32", weight.scales)
    by_output = scales.shape[1] == 1
    codes = graph.constant(f"{module}.codes", weight.codes)
    factors = graph.constant(f"{module}.scales", scales[:, 0] if by_output else scales)
    layer = graph.layer(f"{module}/dequantize", "dequantize", codes, factors, graph.tensorrt.data_type(dtype))
    if by_output:
        layer.axis = 0
    elif weight.codes.dtype.name == "int4":
        layer.axis = 1
    else:
        layer.block_shape = (1, weight.block)
    return graph.cast(f"{module}/round", graph.result(layer), graph.dtype)


def _offset_product(graph: Graph, module: str, x: Any, products: np.ndarray[Any, Any]) -> Any:
    """Return the sums of the inputs of each block, times what is subtracted from the weights of that block."""
    rank, blocks = len(x.shape), products.shape[1]
    wide = graph.cast(f"{module}/inputs_to_float32", x, "float32")
    grouped = graph.shuffle(f"{module}/blocks", wide, reshape=(0,) * (rank - 1) + (blocks, x.shape[-1] // blocks))
    sums = graph.op(f"{module}/block_sums", "reduce", grouped, graph.trt.ReduceOperation.SUM, 1 << rank, False)
    narrow = graph.cast(f"{module}/round_sums", sums, graph.dtype)
    matrix = products.astype(numpy_dtype(graph.dtype)).reshape((1,) * (rank - 2) + products.shape)
    return matmul_transposed(graph, f"{module}/offsets", narrow, graph.constant(f"{module}.offsets", matrix))
