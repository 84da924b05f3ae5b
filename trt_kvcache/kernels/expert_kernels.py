"""Products of a few rows with the experts that a router has chosen for them, at the speed of reading these experts.

Shapes: n rows, k experts of each, E experts. For engines: nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.decoder_layer_kernels import gated
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.kernels.linear_tiles import TILE_ROWS, LinearPlan, expert_plan, linear_plan
from trt_kvcache.kernels.source_variants import EXPERT_SOURCE, variant_name
from trt_kvcache.memory.tensor import DeviceTensor

#: Rows at most, and rows times experts of each.
MAX_EXPERT_ROWS, MAX_EXPERT_PAIRS = TILE_ROWS, 256

#: Activations of experts with a gate, and of those without one.
GATED_EXPERT_ACTIVATIONS, PLAIN_EXPERT_ACTIVATIONS = ("silu", "gelu_tanh"), ("relu2",)


# --- NumPy, for host memory ---


def _up_on_host(
    x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, chosen: DeviceTensor, out: DeviceTensor, activation: str, stream: Any
) -> None:
    rows, results = array_of(x), array_of(out)
    for row, choice in np.ndindex(chosen.shape):
        product = _product(rows[row : row + 1], weight, bias, array_of(chosen)[row, choice])
        results[row, choice] = (np.maximum(product, 0) ** 2 if activation in PLAIN_EXPERT_ACTIVATIONS else gated(activation, product))[0]


def _down_on_host(
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    rows, results = array_of(x), array_of(out)
    for row in range(len(rows)):
        products = [
            factor * _product(rows[row, choice : choice + 1], weight, bias, array_of(chosen)[row, choice])[0]
            for choice, factor in enumerate(array_of(router_weights)[row])
        ]
        results[row] = np.sum(products, axis=0)


def _product(rows: Array, weight: DeviceTensor, bias: DeviceTensor | None, expert: int) -> Array:
    """Return the product with an expert in float32."""
    with np.errstate(invalid="ignore"):  # infinity times a weight of 0
        product: Array = rows.astype(np.float32) @ array_of(weight)[expert].astype(np.float32).T
    return product if bias is None else product + array_of(bias)[expert].astype(np.float32)


# --- CUDA: launches of plugins/linear/experts.cu ---


_WARP = 32


def _up_on_device(
    x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, chosen: DeviceTensor, out: DeviceTensor, activation: str, stream: Any
) -> None:
    has_gate = activation in GATED_EXPERT_ACTIVATIONS
    memory: Any = out.memory
    experts = min(len(weight), chosen.shape[0] * chosen.shape[1])  # at most, if no two rows have chosen the same ones
    plan = expert_plan(out.shape[2], has_gate, experts, memory.arch, memory.multiprocessor_count)
    _launch(f"experts_{activation}{'_mul' if has_gate else ''}", x, weight, bias, chosen, None, out, plan, stream)


def _down_on_device(
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor,
    out: DeviceTensor,
    stream: Any,
) -> None:
    memory: Any = out.memory
    plan = linear_plan(len(out), out.shape[1], False, memory.arch, memory.multiprocessor_count)
    _launch(f"experts_down_{plan.tile}", x, weight, bias, chosen, router_weights, out, plan, stream)


def _launch(
    name: str,
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor | None,
    chosen: DeviceTensor,
    router_weights: DeviceTensor | None,
    out: DeviceTensor,
    plan: LinearPlan,
    stream: Any,
) -> None:
    memory: Any = out.memory
    tensors = (x.ptr, weight.ptr, address(bias), out.ptr, chosen.ptr, address(router_weights))
    launch(
        memory,
        variant_name(EXPERT_SOURCE, x.dtype, TILE_ROWS),
        name,
        (plan.blocks, 1, 1),
        (*tensors, *chosen.shape, out.shape[-1], weight.shape[2], plan.tiles, plan.tile_outputs),
        stream,
        threads=_WARP * plan.warps,
        programmatic_dependent_launch=starts_early(memory),
    )


# --- without checks, for engines ---


#: Multiply rows ``[n, in]`` with the experts ``chosen`` int32 ``[n, k]``, different ones for a row: ``weight [E, width, in]``, ``bias [E,
#: width]`` or None. ``out`` ``[n, k, intermediate]`` is the activation of the product, or with a gate, of its first half times the other.
expert_up_kernel = Kernel(_up_on_host, _up_on_device)

#: Multiply ``x [n, k, in]`` with the experts ``chosen``: ``weight [E, out, in]``. ``out`` ``[n, out]`` is the sum of the products of a
#: row, times ``router_weights`` float32 ``[n, k]``. On a GPU these, ``chosen`` and ``weight`` are read early: the launch before this one on
#: the stream may not write them.
expert_down_kernel = Kernel(_down_on_host, _down_on_device)
