"""The selective state space of Mamba-2 on the device: ``plugins/recurrent/mamba2.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_chunks import BLOCK_TOKENS, CHUNK_STAGES, MIN_CHUNK_TOKENS, block_pairs, chunk_tokens
from trt_kvcache.kernels.recurrent_params import Mamba2Params
from trt_kvcache.kernels.source_variants import variant_name

#: Threads of a block; rows of a state that a thread has a share in, and elements of it; tokens of a tile. The source has them too.
MAMBA_THREADS, MAMBA_ROWS, MAMBA_LANE_ELEMENTS, MAMBA_TILE_TOKENS = 128, 2, 16, 16

#: In chunks: rows of a state that a block has, 16 for a warp, and the state sizes that there are. The source has them too.
CHUNK_ROWS, CHUNK_STATE_SIZES = 64, (64, 128)

_WARP, _WARP_ROWS = 32, 16


class Mamba2Plan(NamedTuple):
    """Which kernel a call takes, and how it is launched."""

    #: The kernel.
    name: str
    #: Rows of a state that a block has.
    rows: int
    #: Threads of a block.
    threads: int
    #: Bytes of dynamic shared memory of a block.
    shared_nbytes: int


def mamba2_plan(params: Mamba2Params, arch: str) -> Mamba2Plan:
    """Return which kernel a call takes on an architecture such as ``"sm_90"``: by shapes and dtypes alone."""
    width, state_size, size = params.x.shape[1], params.b.shape[3], itemsize(params.x.dtype)
    if width >= MIN_CHUNK_TOKENS and state_size in CHUNK_STATE_SIZES and size == itemsize("float16"):
        tokens = chunk_tokens(arch)
        threads = _WARP * (CHUNK_ROWS // _WARP_ROWS + tokens // BLOCK_TOKENS)
        return Mamba2Plan(f"mamba2_chunks_{state_size}", CHUNK_ROWS, threads, _chunk_nbytes(tokens, state_size))
    rows = MAMBA_ROWS * MAMBA_THREADS // _lanes(state_size)
    if width == 1:
        return Mamba2Plan("mamba2_update", rows, MAMBA_THREADS, 0)
    return Mamba2Plan("mamba2_scan", rows, MAMBA_THREADS, _scan_nbytes(state_size, rows, size))


def mamba2_scan(params: Mamba2Params, stream: Any) -> None:
    x = params.x
    slots, width, heads, head_dim = x.shape
    groups, state_size = params.b.shape[2:]
    memory: Any = x.memory
    plan = mamba2_plan(params, memory.arch)
    arguments = (
        *(*token_rows(x), *token_rows(params.dt), *token_rows(params.b), *token_rows(params.c)),
        *(params.a.ptr, address(params.d), address(params.dt_bias), *params.dt_limits),
        *(params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, head_dim, groups, state_size, _lanes(state_size), params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_mamba2", x.dtype, params.past.dtype),
        plan.name,
        (-(-head_dim // plan.rows), heads, slots),
        arguments,
        stream,
        threads=plan.threads,
        shared_nbytes=plan.shared_nbytes,
        programmatic_dependent_launch=starts_early(memory),
    )


def _lanes(state_size: int) -> int:
    """Return how many lanes share a row of a state: a power of 2."""
    lanes = 1
    while lanes * MAMBA_LANE_ELEMENTS < state_size:
        lanes *= 2
    return lanes


def _scan_nbytes(state_size: int, rows: int, size: int) -> int:
    """Return the bytes of shared memory of a scan: ``ScanTiles`` of the source lays it out."""
    two_stages = 2 * MAMBA_TILE_TOKENS * ((2 * state_size + rows) * size + 2 * itemsize("float32"))
    return two_stages + MAMBA_TILE_TOKENS * rows * itemsize("float32")


def _chunk_nbytes(tokens: int, state_size: int) -> int:
    """Return the bytes of shared memory of a scan in chunks: ``MambaMemory`` of the source lays it out."""
    half, single = itemsize("float16"), itemsize("float32")
    stage = tokens * (2 * state_size + CHUNK_ROWS) * half
    matrices = block_pairs(tokens) * BLOCK_TOKENS**2 * half + (2 * tokens + 4) * single
    return CHUNK_STAGES * stage + 2 * matrices + tokens // BLOCK_TOKENS * 2 * tokens * single
