"""Products of a few rows with a matrix of weights, on the device: ``plugins/linear.cu``."""

from typing import Any

from trt_kvcache.kernels.cuda.arguments import address
from trt_kvcache.kernels.cuda.launch import launch, starts_early
from trt_kvcache.kernels.linear_tiles import linear_plan
from trt_kvcache.kernels.source_variants import variant_name
from trt_kvcache.memory.cuda_memory import CudaMemory
from trt_kvcache.memory.tensor import DeviceTensor

_SOURCE, _WARP = "linear", 32


def linear(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    _launch("linear" if out.dtype == x.dtype else f"linear_{out.dtype}", x, weight, bias, out, stream)


def linear_gated_mul(
    activation: str, x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any
) -> None:
    _launch(f"linear_{activation}_mul", x, weight, bias, out, stream)


def _launch(
    name: str,
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    out: DeviceTensor,
    stream: Any,
) -> None:
    memory = out.memory
    assert isinstance(memory, CudaMemory)
    (rows, inputs), outputs, gated = x.shape, out.shape[1], len(weight) > out.shape[1]
    plan = linear_plan(rows, outputs, gated, memory.arch, memory.multiprocessor_count)
    arguments = (x.ptr, weight.ptr, address(bias), out.ptr, rows, outputs, inputs, plan.tiles, plan.tile_outputs, plan.prefetched_steps)
    launch(
        memory,
        variant_name(_SOURCE, x.dtype, plan.rows),
        name if gated else f"{name}_{plan.tile}",
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )
