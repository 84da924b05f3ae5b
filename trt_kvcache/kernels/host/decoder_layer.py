"""What a decoder layer does between its matrix products, in host memory."""

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of
from trt_kvcache.memory.tensor import DeviceTensor


def add_rms_norm(
    hidden: DeviceTensor, change: DeviceTensor, weight: DeviceTensor, out: DeviceTensor, eps: float, weight_offset: float, stream: Any
) -> None:
    total = array_of(hidden)
    total[...] = total.astype(np.float32) + array_of(change).astype(np.float32)
    rounded = total.astype(np.float32)
    scale = 1 / np.sqrt(np.mean(rounded * rounded, axis=1, keepdims=True) + np.float32(eps))
    array_of(out)[...] = rounded * scale * (np.float32(weight_offset) + array_of(weight).astype(np.float32))


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
        units = part.astype(np.float32).reshape(len(part), -1, len(weight))
        scale = 1 / np.sqrt(np.mean(units * units, axis=2, keepdims=True) + np.float32(eps))
        part[...] = (units * scale * (np.float32(weight_offset) + array_of(weight).astype(np.float32))).reshape(part.shape)


def silu_mul(gate_up: DeviceTensor, out: DeviceTensor, stream: Any) -> None:
    gate, up = np.split(array_of(gate_up).astype(np.float32), 2, axis=1)
    array_of(out)[...] = gate / (1 + np.exp(-gate)) * up
