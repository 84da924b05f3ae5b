"""Tensors of quantized caches on a GPU, and what attention over them should return. Needs torch."""

from __future__ import annotations

from typing import Any

import torch
from attention import Gpu

from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import SCALED_KV_DTYPES
from trt_kvcache.kernels.attention_params import TOKEN_SCALES_NDIM
from trt_kvcache.memory.shapes import dense_nbytes

_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


def device_tensor(gpu: Gpu, shape: tuple[int, ...], dtype: str) -> tuple[DeviceTensor, Any]:
    """Return a tensor and torch's view of it; codes, which torch does not take from others, as bytes."""
    allocation = gpu.memory.allocate(dense_nbytes(shape, dtype), stream=gpu.stream)
    seen = "int8" if dtype in SCALED_KV_DTYPES else dtype
    view = torch.from_dlpack(DeviceTensor(allocation, shape=shape, dtype=seen))
    return DeviceTensor(allocation, shape=shape, dtype=dtype), view.view(_DTYPES.get(dtype, view.dtype))


def largest_error(out: Any, q: Any, cache: Any, scales: Any, lengths: Any) -> float:
    """Return max|error| / max|reference| over slots and some heads, from what is stored; the reference is in float64.

    ``out`` and ``q`` are ``[B, s, heads, D]``, ``cache`` ``[B, 2, kv_heads, S, D]`` with the new tokens behind ``lengths`` (B,), and
    ``scales`` ``[2, kv_heads]``, ``[B, 2, kv_heads, S or more]`` or None, on one device.
    """
    worst, (batch, width, heads, dim), kv_heads = 0.0, q.shape, cache.shape[2]
    for slot in range(batch):
        n = int(lengths[slot]) + width
        future = torch.ones(width, n, dtype=torch.bool, device=q.device).triu(n - width + 1)
        for head in range(0, heads, max(heads // 4, 1)):
            kv_head = head * kv_heads // heads
            keys, values = cache[slot, :, kv_head, :n].double()
            if scales is not None:
                of_head = scales[slot, :, kv_head, :n] if scales.ndim == TOKEN_SCALES_NDIM else scales[:, kv_head, None]
                keys, values = (rows * scale[:, None].double() for rows, scale in zip((keys, values), of_head, strict=True))
            scores = (q[slot, :, head].double() @ keys.T) * dim**-0.5
            expected = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
            error = float((out[slot, :, head].double() - expected).abs().max() / expected.abs().max())
            worst = max(worst, error if error == error else torch.inf)
    return worst
