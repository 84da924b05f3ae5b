"""Attention on a CPU over quantized K and V: rows are quantized when written, and dequantized when read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trt_kvcache.kernels.attention_params import HEAD_SCALES_NDIM
from trt_kvcache.kernels.kv_quantization import append_rows, live_rows
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.attention import LiveRowsAttention

_Array = np.ndarray[Any, Any]


class QuantizedRowsAttention(LiveRowsAttention):
    """:class:`LiveRowsAttention` over a quantized cache, in host memory. Values are dequantized to the compute dtype.

    New tokens attend to their own K and V as stored, in quantized form.
    """

    def write(self, layer: int, slots: slice, start: int, end: int, new: list[torch.Tensor]) -> None:
        """Quantize the new rows ``[n, s, H, D]`` of K and of V, and write them into tokens ``start`` to ``end`` of slots."""
        k, v = (rows[:, : end - start].float().numpy() for rows in new)
        for row, (cache, scales) in enumerate(self._stored(layer, slots)):
            append_rows(cache, scales, start, k[row], v[row], self._tensors.caches[layer][0].dtype)

    def read(self, layer: int, slots: slice, first: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[n, H, end - first, D]`` of slots in ``dtype``."""
        rows = [live_rows(cache, scales, slice(first, end)) for cache, scales in self._stored(layer, slots)]
        k, v = (torch.from_numpy(np.stack([sides[side] for sides in rows])).to(dtype) for side in range(2))
        return k, v

    def _stored(self, layer: int, slots: slice) -> list[tuple[_Array, _Array]]:
        """Return the cache ``[2, H, S, D]`` and the scales of slots, as arrays over their bytes."""
        cache, scales = _array(self._tensors.caches[layer][0]), _array(self._tensors.scales[layer])
        by_slot = [scales] * len(cache) if scales.ndim == HEAD_SCALES_NDIM else scales
        return [(cache[slot], by_slot[slot]) for slot in range(slots.start, slots.stop)]


def _array(tensor: DeviceTensor) -> _Array:
    memory = tensor.memory
    assert isinstance(memory, HostMemory)
    return memory.array(tensor)
