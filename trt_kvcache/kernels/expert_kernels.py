"""Products of a few rows with the experts that a router has chosen for them, at the speed of reading these experts.

Shapes: n rows, k experts of each, E experts. Weights are in 16 bits, ``[E, out, in]``, or packed: E matrices one after another, each in
whole tiles of 16 outputs; with a gate, the tiles of the gate, then as many of up. For engines: nothing is checked.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from trt_kvcache.kernels.decoder_layer_kernels import gated
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.linear_tiles import TILE_ROWS, LinearPlan, expert_plan, linear_plan
from trt_kvcache.kernels.packed_layout import count_tiles
from trt_kvcache.kernels.packed_tensors import PackedMatrix
from trt_kvcache.kernels.source_variants import EXPERT_SOURCE, variant_name
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import ClampedSwiGLU

#: Rows at most, and rows times experts of each.
MAX_EXPERT_ROWS, MAX_EXPERT_PAIRS = TILE_ROWS, 256

#: Epilogues of products into experts: an activation of the first half times the second one, an activation, and none.
GATED_EPILOGUES, PLAIN_EPILOGUES = ("silu_mul", "gelu_tanh_mul"), ("relu2", "linear")

#: The same, or clamped SwiGLU of both halves.
Epilogue: TypeAlias = str | ClampedSwiGLU


#: Matrices of all experts.
ExpertWeights: TypeAlias = DeviceTensor | PackedMatrix


# --- NumPy, for host memory ---


def _up_on_host(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    out: DeviceTensor,
    epilogue: Epilogue,
    stream: Any,
) -> None:
    rows, results = array_of(x), array_of(out)
    for row, choice in np.ndindex(chosen.shape):
        product = array_product(rows[row : row + 1], weight, bias, array_of(chosen)[row, choice])
        results[row, choice] = epilogue_results(epilogue, product)[0]


def _down_on_host(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    rows, results = array_of(x), array_of(out)
    for row in range(len(rows)):
        products = [
            factor * array_product(rows[row, choice : choice + 1], weight, bias, array_of(chosen)[row, choice])[0]
            for choice, factor in enumerate(array_of(router_weights)[row])
        ]
        results[row] = np.sum(products, axis=0)


def epilogue_results(epilogue: Epilogue, product: Array) -> Array:
    """Return the epilogue of a product ``[1, width]``."""
    if isinstance(epilogue, ClampedSwiGLU):
        gate, up = np.split(product, 2, axis=1)
        gate, up = np.minimum(gate, epilogue.limit), np.clip(up, -epilogue.limit, epilogue.limit)
        with np.errstate(over="ignore"):  # far below 0, where the quotient becomes 0
            clamped: Array = gate / (1 + np.exp(-epilogue.alpha * gate)) * (up + 1)
        return clamped
    if epilogue in GATED_EPILOGUES:
        return gated(epilogue.removesuffix("_mul"), product)
    squares: Array = np.maximum(product, 0) ** 2
    return squares if epilogue == "relu2" else product


def array_product(rows: Array, weight: ExpertWeights, bias: DeviceTensor | None, expert: int) -> Array:
    """Return the product with an expert in float32."""
    matrix = array_of(weight)[expert] if isinstance(weight, DeviceTensor) else weight.on_host(rows.dtype, expert)
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        product: Array = rows.astype(np.float32) @ matrix.astype(np.float32).T
    return product if bias is None else product + array_of(bias)[expert].astype(np.float32)


# --- CUDA: launches of plugins/linear/experts.cu, packed_experts.cu and super_block_experts.cu ---


_WARP = 32


def _up_on_device(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    out: DeviceTensor,
    epilogue: Epilogue,
    stream: Any,
) -> None:
    clamped = epilogue if isinstance(epilogue, ClampedSwiGLU) else None
    has_gate = clamped is not None or epilogue in GATED_EPILOGUES
    memory: Any = out.memory
    experts = min(_count(weight), chosen.shape[0] * chosen.shape[1])  # at most, if no two rows have chosen the same ones
    plan = expert_plan(out.shape[2], has_gate, experts, memory.arch, memory.multiprocessor_count, _kind(weight))
    name, limits = ("clamped_swiglu", (clamped.alpha, clamped.limit)) if clamped else (epilogue, (0.0, 0.0))
    _launch(f"experts_{name}", x, weight, bias, chosen, None, out, plan, limits, stream)


def _down_on_device(
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    memory: Any = out.memory
    plan = linear_plan(len(out), out.shape[1], False, memory.arch, memory.multiprocessor_count, _kind(weight))
    _launch(f"experts_down_{plan.tile}", x, weight, bias, chosen, router_weights, out, plan, (0.0, 0.0), stream)


def _launch(
    name: str,
    x: DeviceTensor,
    weight: ExpertWeights,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor | None,
    out: DeviceTensor,
    plan: LinearPlan,
    limits: tuple[float, float],  # alpha and limit of clamped SwiGLU
    stream: Any,
) -> None:
    memory: Any = out.memory
    of_rows = (address(bias), out.ptr, chosen.ptr, address(router_weights))
    sizes = (*chosen.shape, out.shape[-1], x.shape[-1], plan.tiles, plan.tile_outputs, *limits)
    if isinstance(weight, DeviceTensor):
        source = variant_name(EXPERT_SOURCE, x.dtype, TILE_ROWS)
        arguments: tuple[Any, ...] = (x.ptr, weight.ptr, *of_rows, *sizes)
    else:
        source, name = weight.expert_variant(x.dtype), f"{weight.prefix}_{name}"
        arguments = (x.ptr, *weight.pointers, *of_rows, *sizes, *weight.numbers)
    launch(
        memory,
        source,
        name,
        (plan.blocks, 1, 1),
        arguments,
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


def _count(weight: ExpertWeights) -> int:
    """Return the number of experts."""
    return len(weight) if isinstance(weight, DeviceTensor) else len(weight.values) // count_tiles(weight.outputs)


def _kind(weight: ExpertWeights) -> str | None:
    return None if isinstance(weight, DeviceTensor) else weight.kind


# --- without checks, for engines ---


#: Multiply rows ``[n, in]`` with the experts ``chosen`` int32 ``[n, k]``, different ones for a row: ``bias [E, width]`` or None. ``out`` is
#: the epilogue of the product, ``[n, k, width]``, or with a gate ``[n, k, width / 2]``.
expert_up_kernel = Kernel(_up_on_host, _up_on_device)

#: Multiply ``x [n, k, in]`` with the experts ``chosen``. ``out`` ``[n, out]`` is the sum of the products of a row, times ``router_weights``
#: float32 ``[n, k]``. On a GPU these, ``chosen`` and the weights are read early: the launch before this one on the stream may not write
#: them.
expert_down_kernel = Kernel(_down_on_host, _down_on_device)
