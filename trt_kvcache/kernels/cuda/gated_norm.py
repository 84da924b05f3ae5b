"""RMS norm with a gate on the device: ``plugins/recurrent/gated_norm.cu``."""

from __future__ import annotations

from typing import Any

from trt_kvcache.dtypes import itemsize
from trt_kvcache.kernels.cuda.arguments import address, token_rows
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.recurrent_checks import has_vectors
from trt_kvcache.kernels.recurrent_params import GatedNormParams
from trt_kvcache.memory.shapes import ROW_GRANULE

#: Threads of a block: ``kNormThreads`` of the source.
NORM_THREADS = 256

#: The largest group that one warp norms.
_WARP_GROUP = 512

_WARP = 32


def gated_rms_norm(params: GatedNormParams, stream: Any) -> None:
    x, size = params.x, params.group_size
    slots, width, columns = x.shape
    in_vectors = size % (ROW_GRANULE // itemsize(x.dtype)) == 0 and has_vectors(x) and has_vectors(params.gate)
    warps = 1 if size <= _WARP_GROUP else NORM_THREADS // _WARP  # of a group
    groups = slots * width * (columns // size)
    arguments = (
        *(*token_rows(x), *token_rows(params.gate), params.weight.ptr, address(params.new_lengths), slots, width, columns),
        *(size, params.weight.shape[0], warps, int(params.gate_first), params.eps, int(in_vectors), params.out.ptr),
    )
    launch(
        x.memory,
        "recurrent_gated_norm",
        f"gated_rms_norm_{x.dtype}",
        (-(-groups * warps * _WARP // NORM_THREADS), 1, 1),
        arguments,
        stream,
        threads=NORM_THREADS,
        programmatic_dependent_launch=starts_early(x.memory),
    )
