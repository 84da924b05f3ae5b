"""The short convolution of recurrent layers on the device: ``plugins/recurrent/causal_conv1d.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_checks import has_vectors
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.shapes import ROW_GRANULE

#: Threads of a block at most, so many of them on a multiprocessor, and tokens that are loaded together. The source has them too.
CONV_THREADS, BLOCKS_PER_SM, TOKENS_IN_FLIGHT = 128, 4, 4

#: Tokens of a tile at most. Each tile loads the inputs before it once more.
_MAX_TILE_TOKENS = 64

_WARP = 32


class CausalConv1dPlan(NamedTuple):
    """Which kernel a call takes, and how it is launched."""

    #: The kernel.
    name: str
    #: Threads of a block.
    threads: int
    #: Blocks for the channels of a token.
    blocks: int
    #: Tokens of a block.
    tile_tokens: int


def causal_conv1d_plan(params: CausalConv1dParams, multiprocessors: int) -> CausalConv1dPlan:
    """Return which kernel a call takes with so many multiprocessors: by shapes, strides and dtypes alone."""
    x, kernel_width = params.x, params.weight.shape[1]
    slots, width, channels = x.shape
    of_thread, name = ROW_GRANULE // itemsize(x.dtype), "causal_conv1d"
    activations = [tensor for tensor in (x, params.gate_in, params.gate_out) if tensor is not None]
    if channels % of_thread or not all(map(has_vectors, activations)):
        of_thread, name = 1, "causal_conv1d_any"
    elif width == 1:
        of_thread, name = of_thread if kernel_width == 3 else of_thread // 2, "causal_conv1d_update"
    needed = channels // of_thread
    # As few threads without channels as can be.
    threads = min(range(CONV_THREADS, CONV_THREADS // 2, -_WARP), key=lambda size: -(-needed // size) * size)
    blocks = -(-needed // threads)
    resident_tiles = max(multiprocessors * (BLOCKS_PER_SM * CONV_THREADS // threads) // (blocks * slots), 1)
    return CausalConv1dPlan(name, threads, blocks, _tile_tokens(width, resident_tiles))


def _tile_tokens(width: int, resident_tiles: int) -> int:
    """Return the tokens of a tile with which the last of the blocks that take turns are about as many as the first ones."""
    turns = -(-width // (resident_tiles * _MAX_TILE_TOKENS))
    tokens = -(-width // (resident_tiles * turns))
    return -(-tokens // TOKENS_IN_FLIGHT) * TOKENS_IN_FLIGHT


def causal_conv1d(params: CausalConv1dParams, stream: Any) -> None:
    x, weight = params.x, params.weight
    slots, width, channels = x.shape
    memory: Any = x.memory
    plan = causal_conv1d_plan(params, memory.multiprocessor_count)
    arguments = (
        *(*token_rows(x), *token_rows(params.gate_in), *token_rows(params.gate_out)),
        *(weight.ptr, address(params.bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, channels, weight.shape[1], int(params.silu), plan.tile_tokens, params.out.ptr),
    )
    launch(
        memory,
        variant_name("recurrent_causal_conv1d", x.dtype, params.past.dtype),
        plan.name,
        (plan.blocks, -(-width // plan.tile_tokens), slots),
        arguments,
        stream,
        threads=plan.threads,
        programmatic_dependent_launch=starts_early(memory),
    )
