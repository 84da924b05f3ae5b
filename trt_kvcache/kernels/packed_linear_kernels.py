"""Projections of a few rows with weights in 4 or 8 bits, and their dequantization to 16 bits. For engines: nothing is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from trt_kvcache.kernels.decoder_layer_kernels import gated
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS, linear_plan, linear_tiles
from trt_kvcache.kernels.packed_layout import FRAGMENT_OUTPUTS, HALF_INPUTS, MIDDLES, count_tiles, unpack_rows, unpack_values
from trt_kvcache.kernels.source_variants import PACKED_LINEAR_SOURCE, packed_variant_name
from trt_kvcache.memory.tensor import DeviceTensor


@dataclass(frozen=True, kw_only=True)
class PackedTensors:
    """A matrix ``[outputs, inputs]``: ``(quantized value - zero point) * scale``, rounded once. Inputs are a multiple of 8."""

    # The layout is that of ``packed_layout.py``; of a stack of matrices the tiles follow each other, see ``expert_kernels.py``.
    # On a GPU weights are read before earlier launches on the stream have ended: none of them may still write them.
    kind: str  # "int4", "int8", or "e2m1" with scales e8m0
    outputs: int
    inputs: int
    group_shift: int
    values: DeviceTensor  # uint8 [tiles, bytes]
    scales: DeviceTensor  # [tiles, groups, 8, 2] in a dtype of scale_dtypes()
    zero_points: DeviceTensor | None  # uint8 or int8 [tiles, groups, 8, 2]


# --- NumPy, for host memory ---


def _linear_on_host(x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = _product(x, weight, bias)


def _gated_mul_on_host(
    x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    array_of(out)[...] = gated(activation, _product(x, weight, bias))


def _dequantize_on_host(out: DeviceTensor, weight: PackedTensors, first_output: int, stream: Any) -> None:
    array_of(out)[...] = dequantized(weight, out.numpy_dtype)[first_output : first_output + len(out)]


def _product(x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None) -> Array:
    """Return the product in float32."""
    weights = dequantized(weight, x.numpy_dtype).astype(np.float32)
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        out: Array = array_of(x).astype(np.float32) @ weights.T
    return out if bias is None else out + array_of(bias).astype(np.float32)


def dequantized(weight: PackedTensors, dtype: np.dtype[Any], matrix: int = 0) -> Array:
    """Return the weights ``[outputs, inputs]`` of a matrix of a stack."""
    shape, count = (weight.outputs, weight.inputs), count_tiles(weight.outputs)
    tiles = slice(matrix * count, (matrix + 1) * count)
    values = unpack_values(array_of(weight.values)[tiles], weight.kind, shape).astype(np.float32)
    group = np.arange(weight.inputs) // HALF_INPUTS >> weight.group_shift
    zero_points: Any = MIDDLES[weight.kind]
    if weight.zero_points is not None:
        zero_points = unpack_rows(array_of(weight.zero_points)[tiles], weight.outputs).astype(np.float32)[:, group]
    stored = unpack_rows(array_of(weight.scales)[tiles], weight.outputs)
    scales = (stored.view(ml_dtypes.float8_e8m0fnu) if weight.kind == "e2m1" else stored).astype(np.float32)[:, group]
    with np.errstate(over="ignore"):
        found: Array = ((values - zero_points) * scales).astype(dtype)
    return found


# --- CUDA: launches of plugins/linear/packed.cu ---


_WARP = 32


def _linear_on_device(x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    _launch("" if out.dtype == x.dtype else f"{out.dtype}_", x, weight, bias, out, stream)


def _gated_mul_on_device(
    x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    _launch(f"{activation}_mul", x, weight, bias, out, stream)


def _launch(suffix: str, x: DeviceTensor, weight: PackedTensors, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    memory: Any = out.memory
    (rows, inputs), outputs, has_gate = x.shape, out.shape[1], weight.outputs > out.shape[1]
    plan = linear_plan(rows, outputs, has_gate, memory.arch, memory.multiprocessor_count, weight.kind)
    launch(
        memory,
        packed_variant_name(PACKED_LINEAR_SOURCE, x.dtype, plan.rows, weight.kind, weight.scales.dtype),
        f"{_prefix(weight)}_linear_{suffix}" + ("" if has_gate else str(plan.tile)),
        (plan.blocks, 1, 1),
        (
            *(x.ptr, weight.values.ptr, weight.scales.ptr, address(weight.zero_points), address(bias), out.ptr),
            *(rows, outputs, inputs, plan.tiles, plan.tile_outputs, plan.prefetched_steps, weight.scales.shape[1], weight.group_shift),
        ),
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


def _dequantize_on_device(out: DeviceTensor, weight: PackedTensors, first_output: int, stream: Any) -> None:
    memory: Any = out.memory
    outputs, inputs = out.shape
    launch(
        memory,
        packed_variant_name(PACKED_LINEAR_SOURCE, out.dtype, ROW_COUNTS[0], weight.kind, weight.scales.dtype),
        f"{_prefix(weight)}_dequantize",
        (-(-outputs // FRAGMENT_OUTPUTS), 1, 1),
        (
            *(weight.values.ptr, weight.scales.ptr, address(weight.zero_points), out.ptr, outputs, inputs),
            *(weight.scales.shape[1], weight.group_shift, first_output // FRAGMENT_OUTPUTS),
        ),
        stream,
        threads=_WARP * linear_tiles(ROW_COUNTS[0], memory.arch, weight.kind).warps,
    )


def _prefix(weight: PackedTensors) -> str:
    return "packed" if weight.zero_points is None else "packed_zero_points"


#: Multiply rows ``[1 to 16, inputs]`` with a packed matrix into ``[rows, outputs]`` of their dtype or float32. The bias may be None.
packed_linear_kernel = Kernel(_linear_on_host, _linear_on_device)

#: The same product, then the activation (``silu``, ``gelu_tanh``) of its first half of columns times its second half. Halves are
#: multiples of 16 columns.
packed_linear_gated_mul_kernel = Kernel(_gated_mul_on_host, _gated_mul_on_device)

#: Write some outputs of a packed matrix, from a multiple of 16 on, as float16 or bfloat16 ``[some, inputs]``.
packed_dequantize_kernel = Kernel(_dequantize_on_host, _dequantize_on_device)
