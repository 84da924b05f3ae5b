"""Projections of a few rows with weights in 4 to 8 bits, and their dequantization to 16 bits. For engines: nothing is checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.decoder_layer_kernels import gated
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.linear_tiles import ROW_COUNTS, linear_plan, linear_tiles
from trt_kvcache.kernels.packed_layout import FRAGMENT_OUTPUTS
from trt_kvcache.kernels.packed_tensors import PackedMatrix
from trt_kvcache.memory.tensor import DeviceTensor

# --- NumPy, for host memory ---


def _linear_on_host(x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = product_on_host(x, weight, bias)


def _gated_mul_on_host(
    x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    array_of(out)[...] = gated(activation, product_on_host(x, weight, bias))


def _dequantize_on_host(out: DeviceTensor, weight: PackedMatrix, first_output: int, stream: Any) -> None:
    array_of(out)[...] = weight.on_host(out.numpy_dtype)[first_output : first_output + len(out)]


def product_on_host(x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None) -> Array:
    """Return the product in float32."""
    weights = weight.on_host(x.numpy_dtype).astype(np.float32)
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        out: Array = array_of(x).astype(np.float32) @ weights.T
    return out if bias is None else out + array_of(bias).astype(np.float32)


# --- CUDA: launches of plugins/linear/packed.cu ---


_WARP = 32


def _linear_on_device(x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    _launch("" if out.dtype == x.dtype else f"{out.dtype}_", x, weight, bias, out, stream)


def _gated_mul_on_device(
    x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, activation: str, stream: Any
) -> None:
    _launch(f"{activation}_mul", x, weight, bias, out, stream)


def _launch(suffix: str, x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    memory: Any = out.memory
    (rows, inputs), outputs, has_gate = x.shape, out.shape[1], weight.outputs > out.shape[1]
    plan = linear_plan(rows, outputs, has_gate, memory.arch, memory.multiprocessor_count, weight.kind)
    launch(
        memory,
        weight.variant(x.dtype, plan.rows),
        f"{weight.prefix}_linear_{suffix}" + ("" if has_gate else str(plan.tile)),
        (plan.blocks, 1, 1),
        (
            *(x.ptr, *weight.pointers, address(bias), out.ptr),
            *(rows, outputs, inputs, plan.tiles, plan.tile_outputs, plan.prefetched_steps, out.strides[0], *weight.numbers),
        ),
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


def _dequantize_on_device(out: DeviceTensor, weight: PackedMatrix, first_output: int, stream: Any) -> None:
    memory: Any = out.memory
    outputs, inputs = out.shape
    launch(
        memory,
        weight.variant(out.dtype, ROW_COUNTS[0]),
        f"{weight.prefix}_dequantize",
        (-(-outputs // FRAGMENT_OUTPUTS), 1, 1),
        (*weight.pointers, out.ptr, outputs, inputs, *weight.numbers, first_output // FRAGMENT_OUTPUTS),
        stream,
        threads=_WARP * linear_tiles(ROW_COUNTS[0], memory.arch, weight.kind).warps,
    )


#: Multiply rows ``[1 to 16, inputs]`` with a packed matrix into ``[rows, outputs]`` of their dtype or float32, which may be columns of a
#: wider tensor. The bias may be None.
packed_linear_kernel = Kernel(_linear_on_host, _linear_on_device)

#: The same product, then the activation (``silu``, ``gelu_tanh``) of its first half of columns times its second half. Halves are
#: multiples of 16 columns.
packed_linear_gated_mul_kernel = Kernel(_gated_mul_on_host, _gated_mul_on_device)

#: Write some outputs of a packed matrix, from a multiple of 16 on, as float16 or bfloat16 ``[some, inputs]``.
packed_dequantize_kernel = Kernel(_dequantize_on_host, _dequantize_on_device)
