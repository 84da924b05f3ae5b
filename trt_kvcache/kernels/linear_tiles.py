"""Compile-time tile sizes of ``linear.cu`` and the sources in ``linear``, and blocks of their launches."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from trt_kvcache.kernels.attention_tiles import MIN_PDL_ARCH, arch_number

#: Rows of x that the source is compiled for.
ROW_COUNTS = (8, 16)

#: Outputs of a small and of a large tile, at most. With a gate tiles are large: half of the outputs are gate, half up.
SMALL_TILE, LARGE_TILE = 16, 32

#: The least share of busy multiprocessors for full tiles, if each has more than a small one. Below it large tiles get fewer outputs.
_MIN_BUSY_SHARE = 0.95

#: Rows of a tile of x, and inputs of a fragment of a warp: ``kTileRows`` and ``kFragmentInputs`` of the source.
TILE_ROWS, FRAGMENT_INPUTS = 8, 64

#: Packed weights: their types in the source, and bits of each.
PACKED_TYPES = {"int4": "Int4", "int8": "Int8", "e2m1": "E2m1", "e4m3": "Float8"}
PACKED_BITS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8, "q4_k": 4, "q5_k": 5, "q6_k": 6}

#: The same for weights in super-blocks.
SUPER_BLOCK_TYPES = {"q4_k": "Q4K", "q5_k": "Q5K", "q6_k": "Q6K"}

#: The dtypes of scales of e2m1: e8m0, powers of two by their exponents; and e4m3, of NVFP4.
EXPONENTS, NVFP4_SCALES = "uint8", "float8_e4m3fn"

_ELEMENT_BITS = 16

_KIB = 1024


class LinearTiles(NamedTuple):
    """Tile sizes for some number of rows of x."""

    #: Warps of a block, which divide the inputs.
    warps: int
    #: Loads of 16 bytes in flight in a thread.
    loads: int
    #: Blocks of a multiprocessor; each computes one tile after another.
    blocks_per_sm: int
    #: Large tiles are chosen if they keep at least this percentage of the multiprocessors busy that small ones would.
    large_percent: int
    #: KiB that a multiprocessor prefetches into the L2 while the launch before ends.
    prefetched_kib: int


class LinearPlan(NamedTuple):
    """A launch, which depends on shapes alone."""

    #: Rows that the source is compiled for.
    rows: int
    #: Outputs of a tile in the kernel; with a gate, rows of ``weight``.
    tile: int
    #: Tiles, and outputs of each.
    tiles: int
    tile_outputs: int
    #: Warps of a block, and blocks.
    warps: int
    blocks: int
    #: Steps of a block that are prefetched into the L2.
    prefetched_steps: int


@cache
def linear_tiles(rows: int, arch: str, packed: str | None = None) -> LinearTiles:
    """Return the sizes for rows of :data:`ROW_COUNTS` on an architecture such as ``"sm_90"``; ``packed``: a key of :data:`PACKED_BITS`."""
    return LinearTiles(
        warps=16,
        loads=4 if packed is not None and PACKED_BITS[packed] < 8 and rows > TILE_ROWS else 8,  # with scales, 8 would spill registers
        blocks_per_sm=1,
        large_percent=97,
        prefetched_kib=32 if arch_number(arch) >= MIN_PDL_ARCH else 0,
    )


def linear_macros(rows: int, arch: str, packed: str | None = None) -> dict[str, int]:
    """Return the macros of the source for rows of :data:`ROW_COUNTS`; ``packed``: a key of :data:`PACKED_BITS`."""
    tiles = linear_tiles(rows, arch, packed)
    return {"ROW_TILES": rows // TILE_ROWS, "WARPS": tiles.warps, "LOADS": tiles.loads}


#: Rows of a tile of ``linear/expert_tiles.cuh``; warps, loads of 16 bytes in flight in a thread, and stages of rows of a block.
TILED_ROWS, TILED_WARPS, _TILED_LOADS, _TILED_STAGES = 64, 8, 16, 4

#: Dynamic shared memory of such a block: stages of 64 inputs of 16 bits.
TILED_SHARED_NBYTES = _TILED_STAGES * TILED_ROWS * FRAGMENT_INPUTS * 2


def expert_tile_macros() -> dict[str, int]:
    """Return the macros of the sources of ``linear/expert_tiles.cuh``."""
    return {"ROW_TILES": TILED_ROWS // TILE_ROWS, "WARPS": TILED_WARPS, "LOADS": _TILED_LOADS, "STAGES": _TILED_STAGES}


@lru_cache(maxsize=256)
def linear_plan(rows: int, outputs: int, gated: bool, arch: str, multiprocessors: int, packed: str | None = None) -> LinearPlan:
    """Return the launch for a product of ``rows`` rows of x with ``outputs`` columns of ``out``, each with a gate or not.

    ``packed``: a key of :data:`PACKED_BITS`; such tiles are whole. None for weights of 16 bits.
    """
    compiled = next(count for count in ROW_COUNTS if rows <= count)
    tiles = linear_tiles(compiled, arch, packed)
    slots = multiprocessors * tiles.blocks_per_sm
    small, large = (_busy_share(-(-outputs // size), slots) for size in (SMALL_TILE, LARGE_TILE))
    tile = LARGE_TILE if gated or 100 * large >= tiles.large_percent * small else SMALL_TILE
    tile_outputs = SMALL_TILE if gated else tile
    if packed is None and not gated and outputs > slots * SMALL_TILE and max(small, large) < _MIN_BUSY_SHARE:
        tile, tile_outputs = LARGE_TILE, -(-outputs // (slots * -(-outputs // (slots * LARGE_TILE))))
    count = -(-outputs // tile_outputs)
    blocks = min(count, slots)
    bits = _ELEMENT_BITS if packed is None else PACKED_BITS[packed]
    step_nbytes = tile * tiles.warps * FRAGMENT_INPUTS * bits // 8
    prefetched_steps = tiles.prefetched_kib * _KIB * multiprocessors // (blocks * step_nbytes)
    return LinearPlan(compiled, tile, count, tile_outputs, tiles.warps, blocks, prefetched_steps)


@lru_cache(maxsize=256)
def expert_plan(outputs: int, gated: bool, experts: int, arch: str, multiprocessors: int, packed: str | None = None) -> LinearPlan:
    """Return the launch for products of few rows into ``experts`` chosen experts of ``outputs`` columns each, with a gate or not.

    Their tiles have as many outputs as give blocks the most equal amounts to read. ``packed``: as for :func:`linear_plan`.
    """
    tiles = linear_tiles(TILE_ROWS, arch, packed)
    slots, largest = multiprocessors * tiles.blocks_per_sm, SMALL_TILE if gated else LARGE_TILE

    def longest(size: int) -> int:
        """Outputs of the busiest block."""
        return -(-experts * -(-outputs // size) // slots) * size

    smallest = 3 * largest // 4 if packed is None else largest - 1  # smaller ones have fewer loads in flight
    size = min(range(largest, smallest, -1), key=longest)
    count = -(-outputs // size)
    return LinearPlan(TILE_ROWS, LARGE_TILE, count, size, tiles.warps, min(experts * count, slots), 0)


def _busy_share(count: int, slots: int) -> float:
    """Return the share of time in which blocks compute, if each takes one tile after another."""
    return count / (-(-count // slots) * slots)
