"""The router of a routed MLP for a few rows: its logits, and the experts that it chooses, with their weights.

Shapes: n rows, k experts of each, E experts. For engines: nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES
from trt_kvcache.kernels.host_arrays import Array, array_of
from trt_kvcache.kernels.kernel import Kernel
from trt_kvcache.kernels.launch import address, launch, starts_early
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model import RouterConfig

#: Rows of a call at most: more are for products of whole tiles.
MAX_ROUTER_ROWS = 64

#: Experts at most: a thread for each, ``kMaxExperts`` of the source.
MAX_EXPERTS = 512

#: Inputs that a thread multiplies at once: their number is a multiple.
ROUTER_INPUTS = 4

_SOURCE, _WARP = "router", 32
_LOGIT_THREADS, _LOGIT_ROWS = 128, 8  # kThreads and kRows of the source


def router_is_supported(router: RouterConfig, inputs: int, dtype: str) -> bool:
    """Return True if the kernels compute this router for rows of ``inputs`` elements of a dtype."""
    return router.num_experts <= MAX_EXPERTS and inputs % ROUTER_INPUTS == 0 and dtype in ELEMENT_TYPES


# --- NumPy, for host memory ---


def _logits_on_host(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, logits: DeviceTensor, stream: Any) -> None:
    products = array_of(x).astype(np.float32) @ array_of(weight).T
    array_of(logits)[:] = products if bias is None else products + array_of(bias)


def _choose_on_host(
    logits: DeviceTensor,
    choice_bias: DeviceTensor | None,
    expert_scale: DeviceTensor | None,
    chosen: DeviceTensor,
    weights: DeviceTensor,
    router: RouterConfig,
    stream: Any,
) -> None:
    scores = array_of(logits)
    if router.scores == "softmax":
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        with np.errstate(over="ignore"):  # far below 0, where the score becomes 0
            scores = 1 / (1 + np.exp(-scores))
    chosen_by = scores if choice_bias is None else scores + array_of(choice_bias)
    if router.num_groups > 1:
        chosen_by = _of_chosen_groups(router, chosen_by)
    experts = _highest(chosen_by, router.experts_per_token)
    factors = np.take_along_axis(scores, experts, axis=1)
    if router.renormalise:
        factors = factors / (factors.sum(axis=1, keepdims=True) + np.float32(router.sum_epsilon))
    factors = factors * np.float32(router.factor)
    array_of(chosen)[:] = experts
    array_of(weights)[:] = factors if expert_scale is None else factors * array_of(expert_scale)[experts]


def _of_chosen_groups(router: RouterConfig, scores: Array) -> Array:
    """Return the scores with -inf for experts of other groups than those with the highest sums of their two highest scores."""
    groups = scores.reshape(len(scores), router.num_groups, router.group_size)
    sums = np.partition(groups, -2, axis=2)[:, :, -2:].sum(axis=2)
    is_other = np.ones(sums.shape, bool)
    np.put_along_axis(is_other, _highest(sums, router.groups_per_token), False, axis=1)
    found: Array = np.where(is_other[:, :, None], np.float32(-np.inf), groups).reshape(scores.shape)
    return found


def _highest(scores: Array, count: int) -> npt.NDArray[np.int64]:
    """Return the columns of the highest scores of each row, from the highest one on."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


# --- CUDA: launches of plugins/router.cu ---


def _logits_on_device(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, logits: DeviceTensor, stream: Any) -> None:
    rows, inputs = x.shape
    launch(
        x.memory,
        _SOURCE,
        f"router_logits_{x.dtype}",
        (len(weight), -(-rows // _LOGIT_ROWS), 1),
        (x.ptr, weight.ptr, address(bias), logits.ptr, rows, inputs // ROUTER_INPUTS),
        stream,
        threads=_LOGIT_THREADS,
        programmatic_dependent_launch=starts_early(x.memory),
    )


def _choose_on_device(
    logits: DeviceTensor,
    choice_bias: DeviceTensor | None,
    expert_scale: DeviceTensor | None,
    chosen: DeviceTensor,
    weights: DeviceTensor,
    router: RouterConfig,
    stream: Any,
) -> None:
    rows, choices = chosen.shape
    counts = (router.num_experts, choices, router.num_groups, router.groups_per_token)
    options = (int(router.scores == "softmax"), int(router.renormalise), float(router.sum_epsilon), float(router.factor))
    launch(
        logits.memory,
        _SOURCE,
        "choose_experts",
        (rows, 1, 1),
        (
            *(logits.ptr, address(choice_bias), address(expert_scale), chosen.ptr, weights.ptr),
            *(*counts, *options),
        ),
        stream,
        threads=-(-router.num_experts // _WARP) * _WARP,
        programmatic_dependent_launch=starts_early(logits.memory),
    )


# --- without checks, for engines ---


#: Write the products of rows ``x [n, in]`` with ``weight [E, in]``, plus ``bias [E]`` or None, into ``logits [n, E]``, all float32 but x.
#: On a GPU weights and biases, here and below, are read early: the launch before this one on the stream may not write them.
router_logits_kernel = Kernel(_logits_on_host, _logits_on_device)

#: Write the experts with the highest scores of each row of ``logits``, of equal ones those with the lower numbers, into ``chosen`` int32
#: ``[n, k]``, and their weights into ``weights`` float32 ``[n, k]``. With groups, experts of the groups with the highest sums of their two
#: highest scores only. ``choice_bias [E]`` or None is added to scores for the choice only; ``expert_scale [E]`` or None multiplies the
#: weights.
choose_experts_kernel = Kernel(_choose_on_host, _choose_on_device)
