"""The kernels of this package over tensors of torch, on a GPU.

Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, S rows of cache per slot, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch

from trt_kvcache.kernels import AttentionWorkspace, add_rms_norm, attend, silu_mul, split_qkv
from trt_kvcache.kernels.decoder_layer import MAX_ROWS
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.ops.unowned_workspace import UnownedAllocation
from trt_kvcache.torch_engine.model import Elementwise
from trt_kvcache.torch_engine.step import TorchStep


class KernelAttention:
    """The attention kernels of this package, on a GPU.

    Parameters
    ----------
    step : TorchStep
        Of which ``combined`` is not None.
    memory : Memory
        The GPU.
    cos_sin : DeviceTensor float32 ``[S, 2, D // 2]``
        Cosine and sine of each position.
    workspace : AttentionWorkspace
        Of the kernels.
    stream : cuda.core.Stream
        The launches are ordered on it.
    """

    def __init__(self, step: TorchStep, memory: Memory, cos_sin: DeviceTensor, workspace: AttentionWorkspace, stream: Any) -> None:
        assert step.combined is not None
        self._caches, self._start = step.combined, step.tensors.start
        self._memory, self._cos_sin, self._workspace, self._stream = memory, cos_sin, workspace, stream

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        cache = self._caches[layer]
        kv_heads = cache.shape[2]
        heads = qkv.shape[2] - 2 * kv_heads
        out = qkv.new_empty((*qkv.shape[:2], heads, qkv.shape[3]))
        q, k, v = split_qkv(borrowed(qkv, self._memory), heads, kv_heads)
        attend(
            q, k, v, cache, self._start,
            out=borrowed(out, self._memory), workspace=self._workspace, cos_sin=self._cos_sin, stream=self._stream,
        )  # fmt: skip
        return out


class KernelElementwise(Elementwise):
    """Residual and norm in one launch, and the gate of the MLP in another.

    Parameters
    ----------
    memory : Memory
        The GPU.
    stream : cuda.core.Stream
        The launches are ordered on it.
    """

    def __init__(self, memory: Memory, stream: Any) -> None:
        self._memory, self._stream = memory, stream

    def add_rms_norm(
        self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Elementwise.add_rms_norm`. Overwrites ``hidden`` with the sum."""
        if hidden.shape[0] * hidden.shape[1] > MAX_ROWS or hidden.shape[2] % 2:
            return super().add_rms_norm(hidden, change, weight, eps)
        out = torch.empty_like(hidden)
        total, added, normed = (borrowed(part.flatten(0, 1), self._memory) for part in (hidden, change, out))
        add_rms_norm(total, added, borrowed(weight, self._memory), out=normed, eps=eps, stream=self._stream)
        return hidden, out

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :meth:`Elementwise.gated`."""
        slots, width, columns = gate_up.shape
        if slots * width > MAX_ROWS or columns % 4:
            return super().gated(gate_up)
        out = gate_up.new_empty((slots, width, columns // 2))
        silu_mul(borrowed(gate_up.flatten(0, 1), self._memory), out=borrowed(out.flatten(0, 1), self._memory), stream=self._stream)
        return out


def borrowed(tensor: torch.Tensor, memory: Memory) -> DeviceTensor:
    """Return a view of a dense tensor of torch.

    Parameters
    ----------
    tensor : torch.Tensor
        It must live until the kernel that reads or writes it is launched: torch reuses memory in the order of the stream.
    memory : Memory
        Where it is.
    """
    allocation = UnownedAllocation(memory, tensor.nbytes)
    allocation.ptr = tensor.data_ptr()
    return DeviceTensor(allocation, shape=tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))
