"""The selective state space of Mamba-2 on the device: ``plugins/recurrent/mamba2.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_params import Mamba2Params
from trt_kvcache.kernels.source_variants import variant_name

#: Threads of a block; rows of a state that a thread has a share in, and elements of it; tokens of a tile. The source has them too.
MAMBA_THREADS, MAMBA_ROWS, MAMBA_LANE_ELEMENTS, MAMBA_TILE_TOKENS = 128, 2, 16, 16


def mamba2_scan(params: Mamba2Params, stream: Any) -> None:
    x = params.x
    slots, width, heads, head_dim = x.shape
    groups, state_size = params.b.shape[2:]
    lanes = 1
    while lanes * MAMBA_LANE_ELEMENTS < state_size:
        lanes *= 2
    rows = MAMBA_ROWS * MAMBA_THREADS // lanes  # of a block
    arguments = (
        *(*token_rows(x), *token_rows(params.dt), *token_rows(params.b), *token_rows(params.c)),
        *(params.a.ptr, address(params.d), address(params.dt_bias), *params.dt_limits),
        *(params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, head_dim, groups, state_size, lanes, params.out.ptr),
    )
    launch(
        x.memory,
        variant_name("recurrent_mamba2", x.dtype, params.past.dtype),
        "mamba2_update" if width == 1 else "mamba2_scan",
        (-(-head_dim // rows), heads, slots),
        arguments,
        stream,
        threads=MAMBA_THREADS,
        shared_nbytes=0 if width == 1 else _scan_nbytes(state_size, rows, itemsize(x.dtype)),
        programmatic_dependent_launch=starts_early(x.memory),
    )


def _scan_nbytes(state_size: int, rows: int, size: int) -> int:
    """Return the bytes of shared memory of a scan: ``ScanTiles`` of the source lays it out."""
    two_stages = 2 * MAMBA_TILE_TOKENS * ((2 * state_size + rows) * size + 2 * itemsize("float32"))
    return two_stages + MAMBA_TILE_TOKENS * rows * itemsize("float32")
