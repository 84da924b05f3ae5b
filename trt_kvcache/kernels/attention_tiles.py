"""Sizes of the attention kernels' tiles, by head dim and by the shared memory of a GPU. ``plugins/attention`` takes them as macros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from trt_kvcache.memory.shapes import row_nbytes

if TYPE_CHECKING:
    from trt_kvcache.model import AttentionConfig

#: The dtypes that the kernels are compiled for, with their names in the sources.
ELEMENT_TYPES = {"float16": "Float16", "bfloat16": "BFloat16"}

#: The dtypes of a cache with scales, with their names in the sources.
STORED_TYPES = {"float8_e4m3fn": "Float8", "int8": "Int8"}

#: The head dims that the kernels are compiled for.
HEAD_DIMS = (64, 80, 96, 128, 256, 512)

#: Those of the decode kernels. With larger heads the prefill kernels, in which two warps divide the columns of a row, take decode steps.
DECODE_HEAD_DIMS = HEAD_DIMS[:-1]

#: Query heads for each K/V head, at most.
MAX_GROUP = 16

#: The first architecture that has the kernels' instructions: ``sm_80``.
MIN_ARCH = 80

#: The first architecture with programmatic dependent launch: ``sm_90``.
MIN_PDL_ARCH = 90

#: The range of a scale, and of a softcap: within it float32 scores neither underflow nor overflow.
MIN_SCORE_FACTOR, MAX_SCORE_FACTOR = 1e-6, 1e6

#: Rows of q of a K/V head (query heads times new tokens) that each decode kernel has room for; the last is for several new tokens only.
DECODE_ROWS = (8, 16, 32)

#: New tokens of a slot, at most, in the decode kernels for a few new tokens.
MAX_FEW_TOKENS = 8

_KIB = 1024

#: Bytes of shared memory that a block may have. Any other architecture has at least ``_MIN_SHARED_NBYTES``.
_SHARED_NBYTES = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 * _KIB),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110", "sm_990"), 227 * _KIB),
}
_MIN_SHARED_NBYTES = 99 * _KIB

#: Shared memory that the system reserves for each block. A multiprocessor has this much more than a block may have.
_RESERVED_NBYTES = _KIB

#: Cost of stream-K for a block, in tiles that it could load meanwhile. Measured on an H200; other architectures take its value.
_STREAMK_COST_TILES = {"sm_90": 20}


class PrefillVariant(NamedTuple):
    """Tile sizes of a prefill kernel, for its launch."""

    #: Rows of a row block: new tokens times query heads.
    rows: int
    #: Warps of a block.
    warps: int
    #: Keys of a tile; of one ring, if each of two warpgroups has its own tiles.
    tile_keys: int
    #: Fewest tiles for which another block pays.
    min_tiles: int
    #: Resident blocks of a multiprocessor.
    blocks_per_sm: int
    #: Bytes of dynamic shared memory of a block.
    shared_nbytes: int
    #: Splits of a row block, at most: shared memory has room for a fragment of each while a block merges them.
    max_splits: int
    #: True if four warps multiply together (``wgmma``).
    warpgroups: bool


@cache
def arch_number(arch: str) -> int:
    """Return the number of an architecture: 90 of ``"sm_90"``."""
    return int(arch.removeprefix("sm_"))


def shared_limit(arch: str) -> int:
    """Return the bytes of shared memory that a block may have on an architecture such as ``"sm_90"``."""
    return _SHARED_NBYTES.get(arch, _MIN_SHARED_NBYTES)


def share_nbytes(arch: str, blocks_per_sm: int) -> int:
    """Return the bytes of shared memory that a block may have if this number of blocks shares a multiprocessor."""
    return (shared_limit(arch) + _RESERVED_NBYTES) // blocks_per_sm - _RESERVED_NBYTES


def spread_nbytes(arch: str, blocks_per_sm: int) -> int:
    """Return the least bytes of shared memory of a block that keep a multiprocessor from holding more than this number of blocks."""
    return (shared_limit(arch) + _RESERVED_NBYTES) // (blocks_per_sm + 1) - _RESERVED_NBYTES + 16


def decode_block_nbytes(head_dim: int, rows: int, tiles: Mapping[str, int], *, quantized: bool = False) -> int:
    """Return the bytes of shared memory of a decode block.

    ``DecodeSharedMemory`` in ``plugins/attention/kv_pipeline.cuh`` lays it out: ring, head buffers, a single new token, totals of warps.
    """
    row, warps, new_tokens = row_nbytes(head_dim, "float16"), tiles["WARPS"], tiles["MAX_NEW_TOKENS"]
    stored = row // 2 if quantized else row
    ring = warps * (2 * tiles["STAGES"] - 1) * tiles["TILE_TOKENS"] * (stored + (4 if quantized else 0))
    new_scales = -(-8 * new_tokens // 16) * 16 if quantized else 0
    heads = tiles["HEAD_BUFFERS"] * ((rows + 4 * new_tokens) * row + new_scales)
    return ring + heads + (2 * stored if new_tokens == 1 else 0) + 8 * warps * rows


@cache
def decode_tiles(head_dim: int, arch: str, *, quantized: bool = False) -> dict[str, int]:
    """Return the macros of the decode kernels: the most warps, and then the most stages, that fit into shared memory.

    ``plugins/attention/decode_params.cuh`` describes the macros.
    """
    return _decode_tiles(head_dim, arch, MAX_GROUP, 1, 0, quantized)


@cache
def few_tiles(head_dim: int, arch: str, *, quantized: bool = False) -> dict[str, int]:
    """Return the macros of the decode kernels for a few new tokens: the same, with room for more rows and tokens.

    With a head dim of 256, the output of more than 16 rows would not fit into registers, nor a further buffer into shared memory.
    """
    rows, left_out = (32, 0) if head_dim <= 128 else (16, 1)
    return {**_decode_tiles(head_dim, arch, rows, MAX_FEW_TOKENS, left_out, quantized), "MAX_ROWS": rows}


def _decode_tiles(head_dim: int, arch: str, rows: int, new_tokens: int, buffers_left_out: int, quantized: bool) -> dict[str, int]:
    tile_tokens = (32 if head_dim <= 64 else 16) * (2 if quantized else 1)
    sizes = {"TILE_TOKENS": tile_tokens, "MAX_NEW_TOKENS": new_tokens}
    for warps in (8, 4, 2):
        tried = [{"WARPS": warps, "STAGES": stages, "HEAD_BUFFERS": stages - buffers_left_out, **sizes} for stages in (4, 3, 2)]
        fitting = [one for one in tried if decode_block_nbytes(head_dim, rows, one, quantized=quantized) <= shared_limit(arch)]
        if fitting:
            break
    return {
        **fitting[0],
        "BLOCKS_PER_SM": 1,
        "MIN_TILES_PER_BLOCK": 8,
        "STREAMK_COST_TILES": _STREAMK_COST_TILES.get(arch, _STREAMK_COST_TILES["sm_90"]),
        "QK_ACCUMULATORS": 2,  # with twice the tokens in a tile there are enough independent sums anyway
    }


#: The prefill kernels. "16", "32" and "64" rows in a row block: few new tokens, which they append too. "short" and "wide": more new tokens,
#: in few and in many row blocks. "whole": one block for each row block.
PREFILL_VARIANTS = ("16", "32", "64", "short", "wide", "whole")

#: New tokens of a slot, at most, that "16", "32" and "64" append.
MAX_APPENDED_WIDTH = 32

#: Columns of a fragment, a tile of the partial result of a prefill kernel, and its bytes: ``kFragmentVectors`` of
#: ``plugins/attention/split_kv_reduce.cuh``.
_FRAGMENT_COLUMNS, _FRAGMENT_NBYTES = 32, 5 * 16

#: Warps for rows, warps for keys; tiles of 16 rows of a warp; keys of a tile; stages; fewest tiles of a block; blocks of a multiprocessor;
#: 1 if four warps multiply together (``plugins/attention/warpgroup.cuh``). ``benchmarks/attention_notes.md`` has what else was measured.
_PREFILL_MACROS = ("ROW_WARPS", "KEY_WARPS", "ROW_TILES", "TILE_KEYS", "STAGES", "MIN_TILES", "BLOCKS_PER_SM", "WARPGROUPS")

#: The architectures with ``wgmma``: four warps multiply together.
_WARPGROUP_ARCHS = {"sm_90", "sm_990"}

#: Head dims above this one: two warps divide the columns (``kColumnWarps`` in ``plugins/attention/config.cuh``).
_MAX_WARP_COLUMNS = 256

_UP_TO_128 = [
    (1, 8, 1, 128, 3, 1, 1, 0),
    (2, 4, 1, 128, 3, 1, 1, 0),
    (4, 2, 1, 128, 3, 1, 1, 1),
    (4, 2, 1, 128, 3, 1, 1, 1),
    (4, 1, 1, 64, 3, 4, 2, 1),
    (8, 1, 1, 64, 2, 1, 2, 1),
]

#: By head dim.
_WARPGROUP_VARIANTS = {
    64: [*_UP_TO_128[:2], (4, 1, 1, 64, 3, 2, 2, 1), *_UP_TO_128[3:]],
    128: _UP_TO_128,
    256: [
        (1, 4, 1, 64, 3, 1, 1, 0),
        (2, 4, 1, 64, 3, 1, 1, 0),
        (4, 2, 1, 64, 3, 1, 1, 1),
        (4, 2, 1, 64, 3, 1, 1, 1),
        (4, 1, 1, 64, 3, 2, 1, 1),
        (8, 1, 1, 64, 2, 1, 1, 1),
    ],
}

#: Where two warps divide the columns: with much shared memory, and with little. Tiles of 32 keys, where 16 suffice for the bytes in
#: flight, would spill registers in the kernels that append.
_DIVIDED_COLUMNS = [
    (1, 2, 1, 32, 3, 1, 1, 0),
    (2, 1, 1, 16, 5, 2, 1, 0),
    (4, 1, 1, 16, 4, 4, 1, 0),
    *[(4, 1, 1, 32, 2, 4, 1, 0)] * 2,
    (4, 1, 1, 32, 2, 1, 1, 0),
]
_DIVIDED_COLUMNS_SMALL = [(1, 1, 1, 16, 2, 2, 1, 0), *[(2, 1, 1, 16, 2, 2, 1, 0)] * 5]


@cache
def prefill_tiles(head_dim: int, arch: str) -> dict[str, int]:
    """Return the macros of the prefill kernels: their names end with one of :data:`PREFILL_VARIANTS`."""
    large = shared_limit(arch) >= 227 * _KIB
    if head_dim > _MAX_WARP_COLUMNS:
        return _prefill_macros(_DIVIDED_COLUMNS if large else _DIVIDED_COLUMNS_SMALL)
    if arch in _WARPGROUP_ARCHS and large and head_dim % 64 == 0:
        return _prefill_macros(_WARPGROUP_VARIANTS[head_dim])
    if head_dim <= 128:
        if large:
            variants = [
                (1, 8, 1, 128, 3, 1, 1),
                (2, 4, 1, 128, 3, 1, 1),
                (4, 2, 1, 128, 3, 1, 1),
                (4, 1, 1, 64, 3, 4, 2),
                (4, 1, 1, 64, 3, 4, 2),
                (4, 1, 2, 64, 2, 1, 2),
            ]
        else:
            few = [(1, 4, 1, 64, 2, 1, 1), (2, 2, 1, 64, 2, 1, 1), (4, 1, 1, 64, 2, 1, 1)]
            variants = [*few, (4, 1, 1, 64, 2, 4, 1), (4, 1, 1, 64, 2, 4, 1), (4, 1, 2, 32, 2, 1, 1)]
    elif large:
        few = [(1, 4, 1, 64, 3, 1, 1), (2, 4, 1, 64, 3, 1, 1), (4, 1, 1, 32, 3, 2, 1)]
        variants = [*few, (4, 1, 1, 32, 2, 6, 2), (4, 1, 1, 32, 2, 6, 2), (8, 1, 1, 64, 2, 1, 1)]
    else:
        few = [(1, 2, 1, 32, 2, 2, 1), (2, 1, 1, 32, 2, 2, 1), (4, 1, 1, 32, 2, 2, 1)]
        variants = [*few, (4, 1, 1, 32, 2, 4, 1), (4, 1, 1, 32, 2, 4, 1), (4, 1, 1, 32, 2, 1, 1)]
    return _prefill_macros([(*variant, 0) for variant in variants])


@cache
def quantized_prefill_tiles(head_dim: int, arch: str) -> dict[str, int]:
    """Return the macros of the prefill kernels over a quantized cache: fewer keys or rows if tiles and quantized values do not fit.

    With warpgroups a multiprocessor has one block of 128 rows at head dim 128: two would leave too few registers.
    """
    tiles = prefill_tiles(head_dim, arch)
    if head_dim > _MAX_WARP_COLUMNS:
        if shared_limit(arch) < 227 * _KIB:
            row_warps = 1 if shared_limit(arch) == _MIN_SHARED_NBYTES else 2  # one would convert so many values that registers spill
            return {**tiles, **{f"ROW_WARPS_{variant.upper()}": row_warps for variant in PREFILL_VARIANTS}}
        return {**tiles, **{f"TILE_KEYS_{variant.upper()}": 16 for variant in PREFILL_VARIANTS[2:]}}
    if head_dim > 128 and shared_limit(arch) < 227 * _KIB:
        return {**tiles, **{f"TILE_KEYS_{variant.upper()}": 16 for variant in ("64", "short", "wide", "whole")}}
    if head_dim == 128 and tiles["WARPGROUPS_WHOLE"]:
        return {**tiles, "STAGES_WHOLE": 3, "BLOCKS_PER_SM_WHOLE": 1}
    return tiles


def _prefill_macros(variants: Sequence[tuple[int, ...]]) -> dict[str, int]:
    return {
        f"{macro}_{variant.upper()}": value
        for variant, values in zip(PREFILL_VARIANTS, variants, strict=True)
        for macro, value in zip(_PREFILL_MACROS, values, strict=True)
    }


@cache
def prefill_variant(head_dim: int, arch: str, variant: str, quantized: bool = False) -> PrefillVariant:
    """Return the tile sizes of one of :data:`PREFILL_VARIANTS`, over a quantized cache or over one of 16 bits."""
    # Shared memory has q, then the ring of prefill_ring.cuh, or two tiles, the stages of prefill_stored_ring.cuh and the scales of keys;
    # then, where two warps divide the columns, their sums for a tile.
    tiles = quantized_prefill_tiles(head_dim, arch) if quantized else prefill_tiles(head_dim, arch)
    row_warps, key_warps, row_tiles, tile_keys, stages, min_tiles, per_sm, warpgroups = (
        tiles[f"{macro}_{variant.upper()}"] for macro in _PREFILL_MACROS
    )
    rows = 16 * row_warps * row_tiles
    row, fragments = row_nbytes(head_dim, "float16"), rows * -(-head_dim // _FRAGMENT_COLUMNS)
    tile = 2 * tile_keys * row
    ring, scales = (2 * tile + (stages - 1) * tile // 2, 8 * tile_keys) if quantized else (stages * tile, 0)
    max_splits = (ring - fragments // 2 * _FRAGMENT_NBYTES) // _FRAGMENT_NBYTES
    rings = key_warps if warpgroups and not quantized else 1
    column_warps = 2 if head_dim > _MAX_WARP_COLUMNS else 1
    sums = 4 * rows * tile_keys if column_warps > 1 else 0
    warps, nbytes = row_warps * key_warps * column_warps, rows * row + ring + scales + sums
    return PrefillVariant(rows, warps, tile_keys // rings, min_tiles * rings, per_sm, nbytes, max_splits, bool(warpgroups))


def supports_attention(mixer: AttentionConfig) -> bool:
    """Return True if the kernels compute this attention layer, in a dtype of :data:`ELEMENT_TYPES`."""
    factors = (mixer.score_scale, mixer.score_scale if mixer.softcap is None else mixer.softcap)
    return (
        mixer.head_dim in HEAD_DIMS
        and mixer.group <= MAX_GROUP
        and mixer.rotary_dim % 4 == 0
        and all(MIN_SCORE_FACTOR <= factor <= MAX_SCORE_FACTOR for factor in factors)
    )
