"""The short convolution of recurrent layers on the device: ``plugins/recurrent/causal_conv1d.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_checks import has_vectors
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.shapes import ROW_GRANULE

#: Threads of a block, and tokens of a tile: ``kConvThreads`` and ``kConvTileTokens`` of the source.
CONV_THREADS, CONV_TILE_TOKENS = 128, 16


def causal_conv1d(params: CausalConv1dParams, stream: Any) -> None:
    x, weight = params.x, params.weight
    slots, width, channels = x.shape
    per_vector = ROW_GRANULE // itemsize(x.dtype)
    activations = [tensor for tensor in (x, params.gate_in, params.gate_out) if tensor is not None]
    in_vectors = channels % per_vector == 0 and all(map(has_vectors, activations))
    threads = channels // per_vector if in_vectors else channels
    arguments = (
        *(*token_rows(x), *token_rows(params.gate_in), *token_rows(params.gate_out)),
        *(weight.ptr, address(params.bias), params.past.ptr, params.present.ptr, address(params.new_lengths)),
        *(width, channels, weight.shape[1], int(params.silu), params.out.ptr),
    )
    launch(
        x.memory,
        variant_name("recurrent_causal_conv1d", x.dtype, params.past.dtype),
        "causal_conv1d" if in_vectors else "causal_conv1d_any",
        (-(-threads // CONV_THREADS), -(-width // CONV_TILE_TOKENS), slots),
        arguments,
        stream,
        threads=CONV_THREADS,
        programmatic_dependent_launch=starts_early(x.memory),
    )
