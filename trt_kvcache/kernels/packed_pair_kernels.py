"""Projections of a few rows with two packed matrices in different formats, in one launch. For engines: nothing is checked."""

from __future__ import annotations

from typing import Any, TypeAlias

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import launch, starts_early
from trt_kvcache.kernels.linear_tiles import PAIR_SCALES, PAIRS, pair_plan
from trt_kvcache.kernels.packed_linear_kernels import product_on_host
from trt_kvcache.kernels.packed_tensors import PackedMatrix, PackedTensors
from trt_kvcache.kernels.source_variants import pair_variant_name
from trt_kvcache.memory.tensor import DeviceTensor

#: Two matrices of the same inputs.
Pair: TypeAlias = tuple[PackedMatrix, PackedMatrix]

_WARP = 32


def pair_is_supported(first: PackedMatrix, second: PackedMatrix) -> bool:
    """Return True if the kernels multiply two matrices of the same inputs in one launch, in this order of their outputs."""
    others = [matrix for matrix in (first, second) if isinstance(matrix, PackedTensors)]
    return _kinds((first, second)) in PAIRS and all(one.zero_points is None and one.scales.dtype == PAIR_SCALES for one in others)


def pair_variant(first: PackedMatrix, second: PackedMatrix, dtype: str, rows: int) -> str:
    """Return the compiled variant for two matrices, elements of ``dtype``, and rows of ``ROW_COUNTS``."""
    return pair_variant_name(dtype, rows, _kinds((first, second)))


def _kinds(pair: Pair) -> tuple[str, str]:
    """Return the formats in the order of the kernels."""
    first, second = (matrix.kind for matrix in pair)
    return (second, first) if (second, first) in PAIRS else (first, second)


# --- NumPy, for host memory ---


def _linear_on_host(x: DeviceTensor, pair: Pair, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    first, second = pair
    whole, count = array_of(out), first.outputs
    biases = (None, None) if bias is None else (bias[:count], bias[count:])
    for matrix, of, columns in ((first, biases[0], slice(count)), (second, biases[1], slice(count, None))):
        whole[:, columns] = product_on_host(x, matrix, of)


# --- CUDA: launches of plugins/linear/packed_pairs.cu ---


def _linear_on_device(x: DeviceTensor, pair: Pair, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    memory: Any = out.memory
    rows, inputs = x.shape
    kinds, firsts = _kinds(pair), (0, pair[0].outputs)
    placed = [
        (matrix, 0 if bias is None else bias.ptr + first * itemsize(bias.dtype), out.ptr + first * itemsize(out.dtype))
        for matrix, first in zip(pair, firsts, strict=True)
    ]
    if kinds[0] != pair[0].kind:
        placed.reverse()
    plan = pair_plan(rows, (placed[0][0].outputs, placed[1][0].outputs), kinds, memory.arch, memory.multiprocessor_count)
    of_parts = [
        (*matrix.pointers, *places, matrix.outputs, tiles, steps, *matrix.numbers)
        for (matrix, *places), tiles, steps in zip(placed, plan.tiles, plan.prefetched_steps, strict=True)
    ]
    launch(
        memory,
        pair_variant(*pair, x.dtype, plan.rows),
        f"packed_linear_pair_{plan.tile}",
        (plan.blocks, 1, 1),
        (x.ptr, rows, inputs, plan.tile, out.strides[0], *of_parts[0], *of_parts[1]),
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


#: Multiply rows ``[1 to 16, inputs]`` with two packed matrices into ``[rows, outputs of both]`` of their dtype, which may be columns of a
#: wider tensor: the same bits as those of a launch for each. The bias ``[outputs of both]`` may be None.
packed_linear_pair_kernel = Kernel(_linear_on_host, _linear_on_device)
