"""Products with a matrix ``[out, in]``, in the dtype of the model or packed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.builder.network.graph import Graph
from trt_kvcache.builder.network.packed_weight import PackedWeight
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import BuildError

#: A matrix: as it is, or packed.
Matrix = np.ndarray[Any, Any] | PackedWeight


def matmul_transposed(graph: Graph, name: str, x: Any, weight: Any) -> Any:
    """Return ``x weight^T`` for ``x`` ``[..., in]`` and ``weight`` ``[..., out, in]`` of the same rank."""
    plain, transposed = graph.trt.MatrixOperation.NONE, graph.trt.MatrixOperation.TRANSPOSE
    return graph.op(name, "matrix_multiply", x, plain, weight, transposed)


def projection(graph: Graph, module: str, x: Any, weight: Matrix) -> Any:
    """Return ``x weight^T`` in the dtype of ``x``.

    Of a packed matrix, ``offset * scale`` times the sum of each block of inputs is subtracted; an input order is a gather of ``x``.
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
        matrix = graph.shuffle(f"{module}/as_rank_{rank}", matrix, reshape=(1,) * (rank - 2) + weight.values.shape)
    y = matmul_transposed(graph, f"{module}/matmul", x, matrix)
    if weight.offsets is None:
        return y
    return graph.elementwise(f"{module}/subtract_offsets", y, "SUB", _offset_product(graph, module, x, weight.offsets * weight.scales))


def dequantized(graph: Graph, module: str, weight: PackedWeight) -> Any:
    """Return values times scales ``[out, in]`` of a packed matrix, rounded to the dtype of the model once.

    Its offsets, and the order and factors of its inputs, are not applied.
    """
    factors, dtype = _scales(graph, module, weight)
    layer = graph.layer(f"{module}/dequantize", "dequantize", graph.constant(f"{module}.values", weight.values), factors, dtype)
    rank = len(factors.shape)
    if rank == 1:
        layer.axis = 0
    elif rank == 2 and weight.values.dtype == ml_dtypes.int4:
        layer.axis = 1
    elif rank == 2:
        if not hasattr(type(layer), "block_shape"):
            raise BuildError(
                f"layer `{module}/dequantize`: expected a TensorRT with scales of blocks, {graph.tensorrt} has none. Use a newer one."
            )
        layer.block_shape = weight.block
    return graph.cast(f"{module}/round", graph.result(layer), graph.dtype)


def _scales(graph: Graph, module: str, weight: PackedWeight) -> tuple[Any, Any]:
    """Return the scales of a packed matrix as a tensor, and the ``DataType`` of products with them."""
    wide = graph.tensorrt.data_type("float32")
    if weight.scales.dtype == np.float32:
        narrow = weight.scales.astype(numpy_dtype(graph.dtype))
        is_exact = np.array_equal(narrow.astype(np.float32), weight.scales)
        scales = narrow if is_exact else weight.scales
        one_for_all, by_output = scales.size == 1, weight.block == (1, weight.values.shape[1])
        shaped = scales.reshape(()) if one_for_all else scales[:, 0] if by_output else scales
        stored = graph.constant(f"{module}.scales", shaped)
        return stored, graph.tensorrt.data_type(graph.dtype) if is_exact else wide
    stored = graph.constant(f"{module}.scales", weight.scales)
    if weight.scales.dtype == ml_dtypes.float8_e8m0fnu:
        return stored, wide
    factor = graph.constant(f"{module}.scale_factor", np.array(weight.scale_factor, np.float32))
    return graph.op(f"{module}/dequantize_scales", "dequantize", stored, factor, wide), wide


def _offset_product(graph: Graph, module: str, x: Any, products: np.ndarray[Any, Any]) -> Any:
    """Return the sums of the inputs of each block, times the offsets and scales of its weights."""
    rank, blocks = len(x.shape), products.shape[1]
    wide = graph.cast(f"{module}/inputs_to_float32", x, "float32")
    grouped = graph.shuffle(f"{module}/blocks", wide, reshape=(0,) * (rank - 1) + (blocks, x.shape[-1] // blocks))
    sums = graph.op(f"{module}/block_sums", "reduce", grouped, graph.trt.ReduceOperation.SUM, 1 << rank, False)
    narrow = graph.cast(f"{module}/round_sums", sums, graph.dtype)
    matrix = products.astype(numpy_dtype(graph.dtype)).reshape((1,) * (rank - 2) + products.shape)
    return matmul_transposed(graph, f"{module}/offsets", narrow, graph.constant(f"{module}.offsets", matrix))
