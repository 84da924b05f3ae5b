"""The gated delta rule on the device: ``plugins/recurrent/delta_rule.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_params import DeltaRuleParams
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.shapes import ROW_GRANULE

#: Threads of a block, and tokens of a tile. The source has them too.
DELTA_THREADS, DELTA_TILE_TOKENS = 128, 16

#: Lanes of a row of float32 in a decode step and in a scan, and of a row of 16 bits. The source has them too.
DELTA_UPDATE_LANES, DELTA_SCAN_LANES, DELTA_LANES_16 = 4, 2, 2

_WARP, _STEP_FLOATS = 32, 5


def gated_delta_rule(params: DeltaRuleParams, stream: Any) -> None:
    q, v, size = params.q, params.v, itemsize(params.q.dtype)
    slots, width, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    is_step = width == 1
    state_size = itemsize(params.past.dtype)
    lanes = DELTA_LANES_16 if state_size == itemsize("float16") else DELTA_UPDATE_LANES if is_step else DELTA_SCAN_LANES
    columns = DELTA_THREADS // _WARP * lanes * ROW_GRANULE // state_size  # of a block
    arguments = (
        *(*token_rows(q), *token_rows(params.k), *token_rows(v), *token_rows(params.a), *token_rows(params.b)),
        *(params.decay.ptr, address(params.dt_bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, key_heads, key_dim, value_dim, params.out.ptr),
    )
    # ScanTiles of the source: two stages of tokens with two gates each, and the steps of one.
    tile = (2 * key_dim + columns) * size + 2 * itemsize("float32")
    scan_nbytes = DELTA_TILE_TOKENS * (2 * tile + _STEP_FLOATS * itemsize("float32"))
    launch(
        q.memory,
        variant_name("recurrent_delta_rule", q.dtype, params.past.dtype),
        "delta_rule_update" if is_step else "delta_rule_scan",
        (-(-value_dim // columns), heads, slots),
        arguments,
        stream,
        threads=DELTA_THREADS,
        shared_nbytes=0 if is_step else scan_nbytes,
        programmatic_dependent_launch=starts_early(q.memory),
    )
