"""The gated delta rule on the device: ``plugins/recurrent/delta_rule.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_chunks import BLOCK_TOKENS, CHUNK_STAGES, MIN_CHUNK_TOKENS, block_pairs, chunk_tokens
from trt_kvcache.kernels.recurrent_params import DeltaRuleParams
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.shapes import ROW_GRANULE

#: Threads of a block in a decode step, and columns of a state that it has. The source has them too.
DELTA_UPDATE_THREADS, DELTA_UPDATE_COLUMNS = 256, 128

#: Threads of a block in a scan, lanes of a row, and tokens of a tile. The source has them too.
DELTA_THREADS, DELTA_SCAN_LANES, DELTA_TILE_TOKENS = 128, 2, 16

#: What chunks are compiled for: sizes of keys, smaller ones filled up with zeros, and warps of a block with 16 columns of a state each.
CHUNK_KEY_DIMS, STATE_WARPS = (64, 128), (2, 4)

#: Warps of a block that make matrices of chunks. The source has them too.
MATRIX_WARPS = 4

_WARP, _WARP_COLUMNS, _STEP_FLOATS = 32, 16, 5


class DeltaRulePlan(NamedTuple):
    """Which kernel a call takes, and how it is launched."""

    #: The kernel.
    name: str
    #: Columns of a state that a block has.
    columns: int
    #: Threads of a block.
    threads: int
    #: Bytes of dynamic shared memory of a block.
    shared_nbytes: int


def delta_rule_plan(params: DeltaRuleParams, arch: str, multiprocessors: int) -> DeltaRulePlan:
    """Return which kernel a call takes on an architecture such as ``"sm_90"`` with so many multiprocessors: by shapes and dtypes alone."""
    width, key_dim = params.q.shape[1], params.q.shape[3]
    size = itemsize(params.q.dtype)
    if width == 1:
        return DeltaRulePlan("delta_rule_update", DELTA_UPDATE_COLUMNS, DELTA_UPDATE_THREADS, 0)
    if width >= MIN_CHUNK_TOKENS and size == itemsize("float16"):
        return _chunk_plan(params, arch, multiprocessors)
    columns = DELTA_THREADS // _WARP * DELTA_SCAN_LANES * ROW_GRANULE // itemsize(params.past.dtype)
    return DeltaRulePlan("delta_rule_scan", columns, DELTA_THREADS, _scan_nbytes(key_dim, columns, size))


def gated_delta_rule(params: DeltaRuleParams, stream: Any) -> None:
    q, v = params.q, params.v
    slots, width, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    memory: Any = q.memory
    plan = delta_rule_plan(params, memory.arch, memory.multiprocessor_count)
    arguments = (
        *(*token_rows(q), *token_rows(params.k), *token_rows(v), *token_rows(params.a), *token_rows(params.b)),
        *(params.decay.ptr, address(params.dt_bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, heads, key_heads, key_dim, value_dim, params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_delta_rule", q.dtype, params.past.dtype),
        plan.name,
        (-(-value_dim // plan.columns), heads, slots),
        arguments,
        stream,
        threads=plan.threads,
        shared_nbytes=plan.shared_nbytes,
        programmatic_dependent_launch=starts_early(memory),
    )


def _chunk_plan(params: DeltaRuleParams, arch: str, multiprocessors: int) -> DeltaRulePlan:
    """Return how chunks are launched. A multiprocessor has one block: few warps in many blocks, unless these come in more turns."""
    slots, _, heads, value_dim = params.v.shape
    key_dim = next(one for one in CHUNK_KEY_DIMS if one >= params.q.shape[3])
    turns = {warps: -(-slots * heads * -(-value_dim // (_WARP_COLUMNS * warps)) // multiprocessors) for warps in STATE_WARPS}
    warps = min(STATE_WARPS, key=turns.__getitem__)
    threads = _WARP * (warps + MATRIX_WARPS)
    return DeltaRulePlan(
        f"delta_rule_chunks_{key_dim}_{warps}", _WARP_COLUMNS * warps, threads, _chunk_nbytes(chunk_tokens(arch), key_dim, warps)
    )


def _scan_nbytes(key_dim: int, columns: int, size: int) -> int:
    """Return the bytes of shared memory of a scan: ``ScanTiles`` of the source lays it out."""
    tile = (2 * key_dim + columns) * size + 2 * itemsize("float32")  # of a token, with its gates
    return DELTA_TILE_TOKENS * (2 * tile + _STEP_FLOATS * itemsize("float32"))


def _chunk_nbytes(tokens: int, key_dim: int, warps: int) -> int:
    """Return the bytes of shared memory of a scan in chunks: ``DeltaMemory`` of the source lays it out."""
    half, single = itemsize("float16"), itemsize("float32")
    stage = tokens * (2 * key_dim + _WARP_COLUMNS * warps) * half
    matrices = 3 * block_pairs(tokens) * BLOCK_TOKENS**2 * half + (4 * tokens + 4) * single
    scratch = (2 * tokens + BLOCK_TOKENS**2) * single
    return CHUNK_STAGES * stage + 2 * matrices + MATRIX_WARPS * scratch
