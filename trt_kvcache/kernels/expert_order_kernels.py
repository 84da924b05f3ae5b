"""Kernels that sort pairs of a row and one of its experts by expert, and that add the products of a row with weights.

Shapes: n rows, k experts of each, E experts. For engines: nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.host_arrays import array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import THREADS_PER_BLOCK, launch, starts_early
from trt_kvcache.kernels.linear_tiles import TILED_ROWS
from trt_kvcache.memory.tensor import DeviceTensor

#: Numbers of a row tile: expert, first pair, pairs, and one that is not used.
ROW_TILE_WIDTH = 4

#: Elements that a row of products is a multiple of.
SUM_GRANULE = 4

_SOURCE = "expert_order"


def count_row_tiles(pairs: int, experts: int) -> int:
    """Return the places of row tiles, some of which stay empty."""
    return pairs // TILED_ROWS + experts


# --- NumPy, for host memory ---


def _sort_on_host(chosen: DeviceTensor, order: DeviceTensor, row_tiles: DeviceTensor, experts: int, stream: Any) -> None:
    of_pairs, tiles = array_of(chosen).reshape(-1), array_of(row_tiles)
    array_of(order)[:] = np.argsort(of_pairs, kind="stable")
    tiles[:, 2] = 0
    ends = np.cumsum(np.bincount(of_pairs, minlength=experts)).tolist()
    for expert, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        count = -(-(end - first) // TILED_ROWS)
        each = -(-(end - first) // max(count, 1))
        for tile in range(count):
            begin = first + tile * each
            tiles[first // TILED_ROWS + expert + tile] = expert, begin, max(0, min(each, end - begin)), 0


def _sums_on_host(products: DeviceTensor, weights: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    with np.errstate(invalid="ignore"):  # infinity times 0, or minus infinity
        array_of(out)[:] = (array_of(products).astype(np.float32) * array_of(weights)[:, :, None]).sum(axis=1)


# --- CUDA: launches of plugins/expert_order.cu ---


def _sort_on_device(chosen: DeviceTensor, order: DeviceTensor, row_tiles: DeviceTensor, experts: int, stream: Any) -> None:
    launch(
        chosen.memory,
        _SOURCE,
        "sort_by_expert",
        (experts, 1, 1),
        (chosen.ptr, order.ptr, row_tiles.ptr, len(order), TILED_ROWS),
        stream,
        programmatic_dependent_launch=starts_early(chosen.memory),
    )


def _sums_on_device(products: DeviceTensor, weights: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    rows, choices, width = products.shape
    fours = width // SUM_GRANULE
    launch(
        products.memory,
        _SOURCE,
        f"weighted_sums_{products.dtype}",
        (-(-fours // THREADS_PER_BLOCK), rows, 1),
        (products.ptr, weights.ptr, out.ptr, choices, fours),
        stream,
        programmatic_dependent_launch=starts_early(products.memory),
    )


# --- without checks, for engines ---


#: Sort the pairs ``row * k + choice`` of ``chosen`` int32 ``[n, k]`` by expert into ``order`` int32 ``[n * k]``, and cut those of each
#: expert into row tiles of up to ``TILED_ROWS``: ``row_tiles`` int32 ``[count_row_tiles(n * k, E), 4]``. ``experts``: E.
sort_by_expert_kernel = Kernel(_sort_on_host, _sort_on_device)

#: Write the sums of ``products [n, k, width]``, times ``weights`` float32 ``[n, k]``, into ``out [n, width]``; up to 65,535 rows.
weighted_sums_kernel = Kernel(_sums_on_host, _sums_on_device)
