"""The kernels of recurrent layers over tensors of torch, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.kernels.attention_tiles import MIN_ARCH, arch_number
from trt_kvcache.kernels.causal_conv1d_kernels import KERNEL_WIDTHS, CausalConv1dParams, causal_conv1d_kernel
from trt_kvcache.kernels.delta_rule_kernels import MAX_KEY_DIM, DeltaRuleParams, gated_delta_rule_kernel
from trt_kvcache.kernels.gated_norm_kernels import GatedNormParams, gated_rms_norm_kernel
from trt_kvcache.kernels.mamba2_kernels import MAX_STATE_SIZE, SIZE_GRANULE, Mamba2Params, mamba2_scan_kernel
from trt_kvcache.memory.base import Memory
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.operations import Convolution, DeltaGates, StateSpace
from trt_kvcache.torch_engine.step import TorchStep


def states_are_supported(mixers: Sequence[RecurrentConfig], memory: Memory) -> bool:
    """Return True if the kernels of recurrent layers support all layers and the GPU."""
    return not memory.is_host and all(map(_is_supported, mixers)) and arch_number(memory.arch) >= MIN_ARCH  # type: ignore[attr-defined]


def _is_supported(mixer: RecurrentConfig) -> bool:
    if mixer.kernel not in KERNEL_WIDTHS:
        return False
    if isinstance(mixer, Mamba2Config):
        sizes, is_small = (mixer.head_dim, mixer.state_size), mixer.state_size <= MAX_STATE_SIZE
    elif isinstance(mixer, GatedDeltaNetConfig):
        sizes, is_small = (mixer.key_head_dim, mixer.value_head_dim), mixer.key_head_dim <= MAX_KEY_DIM
    else:
        return True
    return is_small and all(size % SIZE_GRANULE == 0 for size in sizes)


class KernelStates:
    """Implements :class:`~trt_kvcache.torch_engine.operations.StateOperations` by kernels, launched on ``stream``."""

    def __init__(self, step: TorchStep, views: DeviceViews, stream: Any) -> None:
        self._states, self._device_views = step.tensors.states, views
        self._new_lengths, self._stream = step.tensors.new_lengths, stream

    def convolve(
        self,
        layer: int,
        x: torch.Tensor,
        conv: Convolution,
        *,
        silu: bool = False,
        gate_in: torch.Tensor | None = None,
        gate_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.convolve`."""
        past, present = self._states[layer][StateKind.CONV]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        views = self._views(x=x, weight=conv.weight, bias=conv.bias, gate_in=gate_in, gate_out=gate_out, out=out)
        call = CausalConv1dParams(**views, past=past, present=present, silu=silu, new_lengths=self._new_lengths)
        causal_conv1d_kernel(call, self._stream)
        return out

    def scan(self, layer: int, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, space: StateSpace) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.scan`."""
        past, present = self._states[layer][StateKind.RECURRENT]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        views = self._views(x=x, dt=dt, b=b, c=c, a=space.a, d=space.d, dt_bias=space.dt_bias, out=out)
        call = Mamba2Params(**views, past=past, present=present, dt_limits=space.dt_limits, new_lengths=self._new_lengths)
        mamba2_scan_kernel(call, self._stream)
        return out

    def delta_rule(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gates: DeltaGates
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.delta_rule`."""
        past, present = self._states[layer][StateKind.RECURRENT]
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        views = self._views(q=q, k=k, v=v, a=a, b=b, decay=gates.decay, dt_bias=gates.dt_bias, out=out)
        call = DeltaRuleParams(**views, past=past, present=present, new_lengths=self._new_lengths)
        gated_delta_rule_kernel(call, self._stream)
        return out

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *, group_size: int, gate_first: bool, eps: float
    ) -> torch.Tensor:
        """See :meth:`~trt_kvcache.torch_engine.operations.StateOperations.gated_norm`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        views = self._views(x=x, gate=gate, weight=weight, out=out)
        call = GatedNormParams(**views, group_size=group_size, gate_first=gate_first, eps=eps, new_lengths=self._new_lengths)
        gated_rms_norm_kernel(call, self._stream)
        return out

    def _views(self, **tensors: torch.Tensor | None) -> dict[str, Any]:
        return {name: None if tensor is None else self._device_views.of(tensor) for name, tensor in tensors.items()}
