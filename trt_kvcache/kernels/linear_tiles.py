"""Sizes of the kernels for products of few rows: what ``plugins/linear.cu`` is compiled with, and how many blocks are launched."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from trt_kvcache.kernels.attention_tiles import MIN_PDL_ARCH, arch_number

#: Rows of x that the source is compiled for.
ROW_COUNTS = (8, 16)

#: Outputs of a tile of the kernels, at most: of a small one, and of a large one. With a gate it is large: as many of gate and of up.
SMALL_TILE, LARGE_TILE = 16, 32

#: How busy full tiles have to keep multiprocessors, where each has more than a small one. Else large ones have fewer outputs.
_MIN_BUSY_SHARE = 0.95

#: Rows of a tile of x, and inputs of a run of a warp: ``kTileRows`` and ``kRunInputs`` of the source.
TILE_ROWS, RUN_INPUTS = 8, 64

_ELEMENT_NBYTES = 2

_KIB = 1024


class LinearTiles(NamedTuple):
    """Sizes for some number of rows of x."""

    #: Warps of a block, which divide the inputs.
    warps: int
    #: Loads of 16 bytes that a thread has in flight.
    loads: int
    #: Blocks that a multiprocessor is given; a block takes one tile after another.
    blocks_per_sm: int
    #: Large tiles are taken if they keep so many percent as many multiprocessors busy as small ones.
    large_percent: int
    #: What a multiprocessor brings into the L2 while the launch before ends.
    prefetched_kib: int


class LinearPlan(NamedTuple):
    """A launch. It depends on shapes alone."""

    #: Rows that the source is compiled for.
    rows: int
    #: Outputs that a tile of the kernel has room for; of ``weight``, with a gate.
    tile: int
    #: Tiles, and outputs of each.
    tiles: int
    tile_outputs: int
    #: Warps of a block, and blocks.
    warps: int
    blocks: int
    #: Steps of a block that are brought into the L2.
    prefetched_steps: int


@cache
def linear_tiles(rows: int, arch: str) -> LinearTiles:
    """Return the sizes for rows of :data:`ROW_COUNTS` on an architecture such as ``"sm_90"``."""
    return LinearTiles(
        warps=16,
        loads=8,
        blocks_per_sm=1,
        large_percent=97,
        prefetched_kib=32 if arch_number(arch) >= MIN_PDL_ARCH else 0,
    )


def linear_macros(rows: int, arch: str) -> dict[str, int]:
    """Return the macros of the source for rows of :data:`ROW_COUNTS`."""
    tiles = linear_tiles(rows, arch)
    return {"ROW_TILES": rows // TILE_ROWS, "WARPS": tiles.warps, "LOADS": tiles.loads}


@lru_cache(maxsize=256)
def linear_plan(rows: int, outputs: int, gated: bool, arch: str, multiprocessors: int) -> LinearPlan:
    """Return the launch for a product."""
    compiled = next(count for count in ROW_COUNTS if rows <= count)
    tiles = linear_tiles(compiled, arch)
    slots = multiprocessors * tiles.blocks_per_sm
    small, large = (_busy_share(-(-outputs // size), slots) for size in (SMALL_TILE, LARGE_TILE))
    tile = LARGE_TILE if gated or 100 * large >= tiles.large_percent * small else SMALL_TILE
    tile_outputs = SMALL_TILE if gated else tile
    if not gated and outputs > slots * SMALL_TILE and max(small, large) < _MIN_BUSY_SHARE:
        tile, tile_outputs = LARGE_TILE, -(-outputs // (slots * -(-outputs // (slots * LARGE_TILE))))
    count = -(-outputs // tile_outputs)
    blocks = min(count, slots)
    step_nbytes = tile * tiles.warps * RUN_INPUTS * _ELEMENT_NBYTES
    prefetched_steps = tiles.prefetched_kib * _KIB * multiprocessors // (blocks * step_nbytes)
    return LinearPlan(compiled, tile, count, tile_outputs, tiles.warps, blocks, prefetched_steps)


def _busy_share(count: int, slots: int) -> float:
    """Return how busy blocks are with so many tiles, if they take one after another."""
    return count / (-(-count // slots) * slots)
