"""Sizes of the attention kernels' tiles, by head dim and by the shared memory of a GPU. ``plugins/attention*.cu`` take them as macros."""

from __future__ import annotations

from functools import cache

from trt_kvcache.memory.shapes import row_nbytes

#: What the kernels are compiled for: dtypes with their names in the sources, head dims, query heads for each K/V head.
ELEMENTS = {"float16": "Float16", "bfloat16": "BFloat16"}
HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16

#: The first architectures that have their instructions, ``sm_80``, and whose launches can begin while the one before ends, ``sm_90``.
FIRST_ARCH, FIRST_EARLY_ARCH = 80, 90

#: What a scale, and a softcap, may be: the kernels' scores, in float32, are neither lost nor infinite.
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6

#: Rows of the matrix that holds the query heads of a K/V head, in each form of the decode kernel.
DECODE_ROWS = (8, 16)

_KIB = 1024
#: Bytes of shared memory that a block may have. What is not listed has at least as much as the least of them.
_SHARED_NBYTES = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 * _KIB),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110", "sm_990"), 227 * _KIB),
}
_LEAST_SHARED_NBYTES = 99 * _KIB

#: Tiles that a block loads in the time that all tiles in one line cost it; elsewhere as on an H200.
_CROSSING = {"sm_90": 20}


@cache
def arch_number(arch: str) -> int:
    """Return 90 for ``"sm_90"`` and the like."""
    return int(arch.removeprefix("sm_"))


def shared_limit(arch: str) -> int:
    """Return the bytes of shared memory that a block may have on ``"sm_90"`` and the like."""
    return _SHARED_NBYTES.get(arch, _LEAST_SHARED_NBYTES)


def decode_nbytes(head_dim: int, rows: int, warps: int, stages: int, tokens: int) -> int:
    """Return the bytes of shared memory of a decode block with tiles of these sizes."""
    row = row_nbytes(head_dim, "float16")
    return (warps * (2 * stages - 1) * tokens + stages * (rows + 4) + 2) * row + 8 * warps * rows


@cache
def decode_tiles(head_dim: int, arch: str) -> dict[str, int]:
    """Return macros of ``attention_decode.cu``: warps of a block, stages of a warp's ring, tokens of a tile, and others named there."""
    tokens = 32 if head_dim <= 64 else 16
    for warps in (8, 4, 2):
        fitting = [n for n in (2, 3, 4) if decode_nbytes(head_dim, DECODE_ROWS[-1], warps, n, tokens) <= shared_limit(arch)]
        if fitting:
            break
    crossing = _CROSSING.get(arch, _CROSSING["sm_90"])
    return {
        "WARPS": warps,
        "STAGES": fitting[-1],
        "TILE_TOKENS": tokens,
        "BLOCKS_PER_SM": 1,
        "MIN_TILES_PER_BLOCK": 8,
        "STREAMK_COST_TILES": crossing,
        "QK_ACCUMULATORS": 2,
    }


def decode_shared_nbytes(head_dim: int, rows: int, arch: str) -> int:
    """Return the bytes of shared memory of a decode block."""
    tiles = decode_tiles(head_dim, arch)
    return decode_nbytes(head_dim, rows, tiles["WARPS"], tiles["STAGES"], tiles["TILE_TOKENS"])


@cache
def prefill_tiles(head_dim: int, arch: str) -> dict[str, int]:
    """Return macros of ``attention_prefill.cu``: warps of a block, matrices of 16 rows of a warp, keys of a tile, blocks, stages.

    Those of the short form, which may be the same, begin with ``SHORT_``.
    """
    limit = shared_limit(arch)
    large = limit >= 227 * _KIB
    if head_dim > 128:
        form = short = (8, 1, 64, 1) if large else (4, 1, 32, 1)
    elif limit == _LEAST_SHARED_NBYTES:
        form = short = (4, 1, 32, 2)
    else:
        keys = 64 if large else 32
        form, short = (8, 1, 128, 1) if large and head_dim > 64 else (4, 2, keys, 2), (4, 1, keys, 2)
    names = ("WARPS", "ROW_TILES", "TILE_KEYS", "BLOCKS_PER_SM")
    return {
        **dict(zip(names, form, strict=True)),
        **{f"SHORT_{name}": value for name, value in zip(names, short, strict=True)},
        "STAGES": 2,
    }


def prefill_form(head_dim: int, arch: str, *, short: bool) -> tuple[int, int, int]:
    """Return the rows of a prefill block, its warps, and its bytes of shared memory."""
    tiles, prefix = prefill_tiles(head_dim, arch), "SHORT_" if short else ""
    warps, matrices, keys = (tiles[prefix + name] for name in ("WARPS", "ROW_TILES", "TILE_KEYS"))
    rows = 16 * warps * matrices
    return rows, warps, (rows + 2 * tiles["STAGES"] * keys) * row_nbytes(head_dim, "float16")


_TILES = {"attention_decode": decode_tiles, "attention_prefill": prefill_tiles}


def attention_names(source: str) -> list[str]:
    """Return what one source is compiled to: a name for each dtype and head dim; itself alone where it is no attention kernel."""
    if source not in _TILES:
        return [source]
    return [attention_name(source, dtype, head_dim) for dtype in ELEMENTS for head_dim in HEAD_DIMS]


def attention_name(source: str, dtype: str, head_dim: int) -> str:
    """Return the name of one compiled form of a source, such as ``"attention_decode-float16-128"``."""
    return f"{source}-{dtype}-{head_dim}"


def macros_of(name: str, arch: str) -> dict[str, str]:
    """Return the macros that a compiled form is made with; none for what is no attention kernel."""
    source, _, form = name.partition("-")
    if not form:
        return {}
    dtype, head_dim = form.split("-")
    tiles = {macro: str(value) for macro, value in _TILES[source](int(head_dim), arch).items()}
    return {"ELEMENT": ELEMENTS[dtype], "HEAD_DIM": head_dim, **tiles}
