"""The kernels of this package over tensors of torch, on a GPU.

Shapes: A slots, s new tokens per slot, Hq query heads, H K/V heads, S rows of cache per slot, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from trt_kvcache._util.lifetime import Uncopyable
from trt_kvcache.kernels import AttentionWorkspace
from trt_kvcache.kernels.attention_kernels import attend_kernel
from trt_kvcache.kernels.attention_params import AttentionParams
from trt_kvcache.kernels.attention_tiles import ELEMENT_TYPES, MIN_ARCH, arch_number, supports_attention
from trt_kvcache.kernels.decoder_layer_kernels import (
    MAX_ROWS,
    activated_mul_kernel,
    add_rms_norm_kernel,
    gated_mul_kernel,
    qk_rms_norm_kernel,
)
from trt_kvcache.memory.base import Memory
from trt_kvcache.model import AttentionConfig
from trt_kvcache.model.mlp_config import Activation
from trt_kvcache.torch_engine.device_views import DeviceViews
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.operations import Elementwise, HeadCounts
from trt_kvcache.torch_engine.positions import rope_key, rope_tables
from trt_kvcache.torch_engine.step import TorchStep

#: Activations of a gate with a kernel.
_GATE_ACTIVATIONS = ("silu", "gelu_tanh")


def has_gate_kernel(activation: Activation) -> TypeGuard[str]:
    """Return True if the gate of an MLP with this activation has a kernel."""
    return activation in _GATE_ACTIVATIONS


class AttentionInputs(Uncopyable):
    """Step-independent inputs of the attention kernels, made once for all layers (of which :func:`attention_is_supported` is true)."""

    def __init__(self, mixers: Sequence[AttentionConfig], length: int, memory: Memory) -> None:
        stream = memory.create_stream()
        group, head_dim = (max((getattr(mixer, size) for mixer in mixers), default=1) for size in ("group", "head_dim"))
        self.workspace = AttentionWorkspace(memory, num_heads=group, num_kv_heads=1, head_dim=head_dim, stream=stream)
        tables = rope_tables(mixers, length)
        self._tables = {key: memory.to_device(np.stack(table, axis=1), stream=stream) for key, table in tables.items()}
        self.options: tuple[dict[str, Any], ...] = tuple(map(self._options, mixers))
        self.stores_kv = tuple(mixer.stores_kv for mixer in mixers)
        memory.synchronize(stream)

    def _options(self, mixer: AttentionConfig) -> dict[str, Any]:
        key = rope_key(mixer)
        return {
            "cos_sin": None if key is None else self._tables[key],
            "scale": mixer.score_scale,
            "window": mixer.window or 0,
            "softcap": mixer.softcap or 0.0,
        }

    def close(self) -> None:
        """Release the memory. Idempotent."""
        for table in self._tables.values():
            table.allocation.close()
        self.workspace.close()


def attention_is_supported(mixers: Sequence[AttentionConfig], dtype: str, memory: Memory) -> bool:
    """Return True if the attention kernels support all layers, the dtype and the GPU."""
    return (
        not memory.is_host
        and dtype in ELEMENT_TYPES
        and all(supports_attention(mixer) for mixer in mixers)
        and arch_number(memory.arch) >= MIN_ARCH  # type: ignore[attr-defined]
    )


class KernelAttention:
    """The attention kernels of this package, for a step with ``combined`` caches, launched on ``stream``."""

    def __init__(self, step: TorchStep, views: DeviceViews, inputs: AttentionInputs, stream: Any) -> None:
        assert step.combined is not None
        self._caches, self._start = step.combined, step.tensors.start
        self._scales = step.tensors.scales or (None,) * len(step.combined)
        self._ancestors = step.bound_ancestors
        self._views, self._inputs, self._stream = views, inputs, stream

    def __call__(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Write k and v of the new tokens into the cache and return the attention of q over it."""
        qkv = qkv.contiguous()
        cache = self._caches[layer]
        kv_heads = cache.shape[2] if self._inputs.stores_kv[layer] else 0
        heads = qkv.shape[2] - 2 * kv_heads
        out = qkv.new_empty((*qkv.shape[:2], heads, qkv.shape[3]))
        q, k, v = self._views.split_qkv(qkv, heads, kv_heads) if kv_heads else (self._views.of(qkv), None, None)
        call = AttentionParams(
            q=q, k=k, v=v, cache=cache, kv_scales=self._scales[layer], lengths=self._start, new_lengths=None,
            out=self._views.of(out), sinks=None if sinks is None else self._views.of(sinks),
            ancestors=self._ancestors, **self._inputs.options[layer],
        )  # fmt: skip
        attend_kernel(call, self._inputs.workspace, self._stream)
        return out


class KernelElementwise(Elementwise):
    """Fused kernels, launched on ``stream``: residual and norm; norms of q, k and v; gates."""

    def __init__(self, views: DeviceViews, stream: Any) -> None:
        self._views, self._stream = views, stream

    def add_norm(
        self,
        hidden: torch.Tensor,
        change: torch.Tensor,
        norm: TorchNorm | None,
        change_norm: TorchNorm | None,
        factor: float,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Elementwise.add_norm`. Overwrites ``hidden`` with the sum."""
        slots, width, columns = hidden.shape
        norms = [one for one in (norm, change_norm) if one is not None]
        kinds = {(one.epsilon, one.offset) for one in norms} or {(0.0, 0.0)}
        if slots * width > MAX_ROWS or columns % 2 or len(kinds) > 1 or not all(one.has_kernel for one in norms):
            return super().add_norm(hidden, change, norm, change_norm, factor, scale)
        out, rows = hidden if norm is None else torch.empty_like(hidden), self._views.rows_of
        weights = (None if one is None else one.weight for one in (norm, change_norm))
        weight, change_weight, scale_view = (None if one is None else self._views.of(one) for one in (*weights, scale))
        ((eps, offset),) = kinds
        add_rms_norm_kernel(
            rows(hidden),
            rows(change),
            weight,
            None if norm is None else rows(out),
            eps,
            offset,
            change_weight,
            factor,
            scale_view,
            self._stream,
        )
        return hidden, out

    def norm_heads(
        self, qkv: torch.Tensor, heads: HeadCounts, q_norm: TorchNorm | None, k_norm: TorchNorm | None, v_epsilon: float | None
    ) -> torch.Tensor:
        """See :meth:`Elementwise.norm_heads`. Overwrites ``qkv``."""
        slots, width = qkv.shape[:2]
        if q_norm is None or slots * width > MAX_ROWS or qkv.shape[3] % 2:
            return super().norm_heads(qkv, heads, q_norm, k_norm, v_epsilon)
        norms = (q_norm, k_norm or q_norm)  # without heads of k, the kernel reads no weight of theirs
        differ = len({(norm.epsilon, norm.offset) for norm in norms}) > 1
        if differ or not all(norm.has_kernel for norm in norms):
            return super().norm_heads(qkv, heads, q_norm, k_norm, v_epsilon)
        q_weight, k_weight = (self._views.of(norm.weight) for norm in norms)
        options = (heads.query, heads.kv, q_norm.epsilon, q_norm.offset, v_epsilon)
        qk_rms_norm_kernel(self._views.rows_of(qkv), q_weight, k_weight, *options, self._stream)
        return qkv

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See :meth:`Elementwise.gated`."""
        slots, width, columns = gate_up.shape
        if not has_gate_kernel(activation) or slots * width > MAX_ROWS or columns % 4:
            return super().gated(gate_up, activation)
        out = gate_up.new_empty((slots, width, columns // 2))
        gated_mul_kernel(self._views.rows_of(gate_up), self._views.rows_of(out), activation, self._stream)
        return out

    def activated_mul(self, gate: torch.Tensor, factor: torch.Tensor, activation: str) -> torch.Tensor:
        """See :meth:`Elementwise.activated_mul`."""
        slots, width, columns = gate.shape
        if activation not in _GATE_ACTIVATIONS or slots * width > MAX_ROWS or columns % 2:
            return super().activated_mul(gate, factor, activation)
        out, rows = torch.empty_like(gate), self._views.rows_of
        activated_mul_kernel(rows(gate), rows(factor), rows(out), activation, self._stream)
        return out
