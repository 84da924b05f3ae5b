"""Products of the rows of a prompt with the experts that a router has chosen for them, or with one packed matrix, on tensor cores.

Shapes and weights are those of :mod:`trt_kvcache.kernels.expert_kernels`. Rows are in the order of their experts, and each of an expert's
row tiles reads its weights once. For engines: nothing is checked.
"""

from __future__ import annotations

from typing import Any

from trt_kvcache.kernels.expert_kernels import (
    GATED_EPILOGUES,
    Epilogue,
    ExpertWeights,
    array_product,
    epilogue_results,
)
from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.linear_tiles import LARGE_TILE, SMALL_TILE, TILED_ROWS, TILED_SHARED_NBYTES, TILED_WARPS
from trt_kvcache.kernels.packed_tensors import PackedMatrix
from trt_kvcache.kernels.source_variants import EXPERT_TILE_SOURCE, variant_name
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ClampedSwiGLU

# --- NumPy, for host memory ---


def _up_on_host(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    order: DeviceTensor,
    row_tiles: DeviceTensor,
    out: DeviceTensor,
    epilogue: Epilogue,
    stream: Any,
) -> None:
    pairs, results = array_of(order), array_of(out)
    choices = len(pairs) // len(x)
    for expert, first, count, _ in array_of(row_tiles).tolist():
        rows = array_of(x)[pairs[first : first + count] // choices]
        if count:
            results[first : first + count] = epilogue_results(epilogue, array_product(rows, weight, bias, expert))


def _down_on_host(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    order: DeviceTensor,
    row_tiles: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    for expert, first, count, _ in array_of(row_tiles).tolist():
        some = slice(first, first + count)
        if count:
            array_of(out)[array_of(order)[some]] = array_product(array_of(x)[some], weight, bias, expert)


def _linear_on_host(x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    product = array_product(array_of(x), weight, None, 0)
    array_of(out)[:] = product if bias is None else product + array_of(bias).astype(product.dtype)


# --- CUDA: launches of plugins/linear/expert_tiles.cu, packed_expert_tiles.cu and super_block_expert_tiles.cu ---


_WARP = 32


def _up_on_device(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    order: DeviceTensor,
    row_tiles: DeviceTensor,
    out: DeviceTensor,
    epilogue: Epilogue,
    stream: Any,
) -> None:
    _launch(epilogue, x, weight, bias, order, row_tiles, len(order) // len(x), out, stream)


def _down_on_device(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    order: DeviceTensor,
    row_tiles: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    _launch("linear", x, weight, bias, order, row_tiles, 0, out, stream)


def _linear_on_device(x: DeviceTensor, weight: PackedMatrix, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    _launch("linear", x, weight, bias, None, None, 0, out, stream)


def _launch(
    epilogue: Epilogue,
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    order: DeviceTensor | None,
    row_tiles: DeviceTensor | None,
    choices: int,  # that share a row of x; 0 if x has a row for each pair
    out: DeviceTensor,
    stream: Any,
) -> None:
    memory: Any = out.memory
    clamped = epilogue if isinstance(epilogue, ClampedSwiGLU) else None
    name, limits = ("clamped_swiglu", (clamped.alpha, clamped.limit)) if clamped else (str(epilogue), (0.0, 0.0))
    has_gate = clamped is not None or epilogue in GATED_EPILOGUES
    outputs, of_warp = out.shape[1], SMALL_TILE if has_gate else LARGE_TILE
    of_rows = (address(bias), out.ptr, address(order), address(row_tiles))
    sizes = (len(x), choices, outputs, x.shape[1], of_warp, *limits)
    name = f"expert_tiles_{name}"
    if isinstance(weight, DeviceTensor):
        source = variant_name(EXPERT_TILE_SOURCE, x.dtype, TILED_ROWS)
        arguments: tuple[Any, ...] = (x.ptr, weight.ptr, *of_rows, *sizes)
    else:
        source, name = weight.expert_tile_variant(x.dtype), f"{weight.prefix}_{name}"
        arguments = (x.ptr, *weight.pointers, *of_rows, *sizes, *weight.numbers)
    tiles = -(-len(x) // TILED_ROWS) if row_tiles is None else len(row_tiles)
    launch(
        memory,
        source,
        name,
        (tiles, -(-outputs // (TILED_WARPS * of_warp)), 1),
        arguments,
        stream,
        threads=_WARP * TILED_WARPS,
        shared_nbytes=TILED_SHARED_NBYTES,
        programmatic_dependent_launch=starts_early(memory),
    )


# --- without checks, for engines ---


#: Multiply rows ``x [n, in]`` with their experts, ``bias [E, width]`` or None. ``order`` and ``row_tiles`` are those of
#: ``sort_by_expert_kernel``, of n * k pairs. ``out`` ``[n * k, width]``, or with a gate ``[n * k, width / 2]``, is the epilogue of the
#: product, in the order of the experts.
expert_tiles_up_kernel = Kernel(_up_on_host, _up_on_device)

#: Multiply ``x [n * k, in]``, in the order of the experts, with them. ``out [n * k, outputs]`` has the products in the order of pairs.
expert_tiles_down_kernel = Kernel(_down_on_host, _down_on_device)

#: Multiply rows ``x [n, in]`` with one packed matrix, which in NVFP4 has a factor of each tile.
#: ``bias [outputs]`` or None; ``out [n, outputs]``.
packed_tiles_kernel = Kernel(_linear_on_host, _linear_on_device)
