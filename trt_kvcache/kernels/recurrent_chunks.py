"""Chunks of tokens for recurrent kernels on tensor cores. ``plugins/recurrent/chunks.cuh`` has the same numbers."""

from __future__ import annotations

from trt_kvcache.kernels.attention_tiles import shared_limit

#: Stages of a chunk's tiles in shared memory; tokens of a block, which is a matrix of tensor cores.
CHUNK_STAGES, BLOCK_TOKENS = 3, 16

#: The fewest new tokens for which chunks are faster than a scan.
MIN_CHUNK_TOKENS = 17

_LARGE_SHARED_NBYTES = 160 * 1024


def chunk_tokens(arch: str) -> int:
    """Return the tokens of a chunk on an architecture such as ``"sm_90"``: fewer where a block has less shared memory."""
    return 64 if shared_limit(arch) >= _LARGE_SHARED_NBYTES else 32


def block_pairs(tokens: int) -> int:
    """Return the number of pairs of a block of a chunk with itself or an earlier one."""
    blocks = tokens // BLOCK_TOKENS
    return blocks * (blocks + 1) // 2
