"""What a decoder layer does between its matrix products, in host memory."""

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of
from trt_kvcache.kernels.host.gate_activation import gated
from trt_kvcache.memory.tensor import DeviceTensor


def add_rms_norm(
    hidden: DeviceTensor,
    change: DeviceTensor,
    weight: DeviceTensor | None,
    out: DeviceTensor | None,
    eps: float,
    weight_offset: float,
    change_weight: DeviceTensor | None,
    change_factor: float,
    stream: Any,
) -> None:
    total, added = array_of(hidden), array_of(change)
    if change_weight is not None:
        added = _normed(added, change_weight, eps, weight_offset).astype(added.dtype)
    if change_factor != 1:
        added = (added.astype(np.float32) * np.float32(change_factor)).astype(added.dtype)
    total[...] = total.astype(np.float32) + added.astype(np.float32)
    if weight is not None and out is not None:
        array_of(out)[...] = _normed(total, weight, eps, weight_offset)


def qk_rms_norm(
    qkv: DeviceTensor,
    q_weight: DeviceTensor,
    k_weight: DeviceTensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    weight_offset: float,
    stream: Any,
) -> None:
    heads = array_of(qkv)
    for part, weight in ((heads[:, :num_heads], q_weight), (heads[:, num_heads : num_heads + num_kv_heads], k_weight)):
        part[...] = _normed(part.reshape(len(part), -1, len(weight)), weight, eps, weight_offset).reshape(part.shape)


def _normed(rows: np.ndarray, weight: DeviceTensor, eps: float, weight_offset: float) -> np.ndarray:
    """Return the norm of the last axis, in float32."""
    values = rows.astype(np.float32)
    scale = 1 / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(eps))
    normed: np.ndarray = values * scale * (np.float32(weight_offset) + array_of(weight).astype(np.float32))
    return normed


def gated_mul(activation: str, gate_up: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = gated(activation, array_of(gate_up).astype(np.float32))
