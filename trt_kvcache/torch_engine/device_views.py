"""``DeviceViews``: a cache of the ``DeviceTensor`` views of torch tensors, which kernels of this package take as arguments."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from trt_kvcache.kernels import split_qkv
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.torch_engine.device_view import device_view

#: Largest number of views that are kept. A step uses a few views for each weight, and a few that all layers share.
MAX_VIEWS = 8192


class DeviceViews:
    """Views by address, shape and strides, each made once. Most tensors of a layer are at the addresses of the previous layer's."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._views: dict[Hashable, DeviceTensor] = {}
        self._splits: dict[tuple[DeviceTensor, int], tuple[DeviceTensor, DeviceTensor, DeviceTensor]] = {}

    def of(self, tensor: torch.Tensor) -> DeviceTensor:
        """Return a view of a tensor. The tensor must live until the launch that uses it, as torch reuses memory in stream order."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        view = self._views.get(key)
        return self._keep(key, tensor) if view is None else view

    def rows_of(self, tensor: torch.Tensor) -> DeviceTensor:
        """Return a view ``[A * s, ...]`` of a tensor ``[A, s, ...]``: the rows of all slots."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, "rows")
        view = self._views.get(key)
        return self._keep(key, tensor.view(-1, *tensor.shape[2:])) if view is None else view

    def split_qkv(self, qkv: torch.Tensor, heads: int, kv_heads: int) -> tuple[DeviceTensor, DeviceTensor, DeviceTensor]:
        """Return views of q, k and v in one tensor ``[A, s, Hq + 2 * H, D]``."""
        whole = self.of(qkv)
        split = self._splits.get((whole, kv_heads))
        if split is None:
            split = self._splits[whole, kv_heads] = split_qkv(whole, heads, kv_heads)
        return split

    def _keep(self, key: Hashable, tensor: torch.Tensor) -> DeviceTensor:
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
            self._splits.clear()
        view = self._views[key] = device_view(tensor, self._memory)
        return view
