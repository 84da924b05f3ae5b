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

#: Pairs of formats that published files have in projections of one input, for which one launch has kernels: the first, narrower one is in
#: super-blocks; int8 has scales in :data:`PAIR_SCALES`, as Q8_0.
PAIRS = (("q4_k", "q5_k"), ("q4_k", "q6_k"), ("q5_k", "q6_k"), ("q4_k", "int8"), ("q5_k", "int8"), ("q6_k", "int8"))
PAIR_SCALES = "float16"

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
    return _macros(rows, linear_tiles(rows, arch, packed))


def pair_macros(rows: int, arch: str, kinds: tuple[str, str]) -> dict[str, int]:
    """Return the same macros for two matrices of these keys of :data:`PACKED_BITS`."""
    return _macros(rows, pair_tiles(rows, arch, kinds))


def _macros(rows: int, tiles: LinearTiles) -> dict[str, int]:
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


class PairPlan(NamedTuple):
    """A launch of two products of one input, whose matrices have different formats."""

    #: Rows that the source is compiled for.
    rows: int
    #: Outputs of a tile.
    tile: int
    #: Tiles of each product.
    tiles: tuple[int, int]
    #: Warps of a block, and blocks.
    warps: int
    blocks: int
    #: Steps of a block that are prefetched into the L2, of each product.
    prefetched_steps: tuple[int, int]


def pair_tiles(rows: int, arch: str, kinds: tuple[str, str]) -> LinearTiles:
    """Return the sizes for two matrices of these keys of :data:`PACKED_BITS`: those of the one that has fewer loads in flight."""
    return min((linear_tiles(rows, arch, kind) for kind in kinds), key=lambda tiles: tiles.loads)


@lru_cache(maxsize=256)
def pair_plan(rows: int, outputs: tuple[int, int], kinds: tuple[str, str], arch: str, multiprocessors: int) -> PairPlan:
    """Return the launch for products of ``rows`` rows with two matrices of ``outputs`` rows and keys of :data:`PACKED_BITS`."""
    compiled = next(count for count in ROW_COUNTS if rows <= count)
    tiles = pair_tiles(compiled, arch, kinds)
    slots = multiprocessors * tiles.blocks_per_sm
    small, large = (tuple(-(-count // size) for count in outputs) for size in (SMALL_TILE, LARGE_TILE))
    is_large = 100 * _busy_share(sum(large), slots) >= tiles.large_percent * _busy_share(sum(small), slots)
    tile, counts = (LARGE_TILE, large) if is_large else (SMALL_TILE, small)
    blocks = min(sum(counts), slots)
    prefetched_nbytes = tiles.prefetched_kib * _KIB * multiprocessors // (2 * blocks)
    steps = (prefetched_nbytes // (tile * tiles.warps * FRAGMENT_INPUTS * PACKED_BITS[kind] // 8) for kind in kinds)
    return PairPlan(compiled, tile, (counts[0], counts[1]), tiles.warps, blocks, (next(steps), next(steps)))


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
