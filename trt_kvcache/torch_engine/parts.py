"""The mixers of a decoder layer, with their weights. Projections of the same input are fused into one matrix.

Input (after the norm) and output of each are ``[A, s, hidden]``. Shapes: A slots, s new tokens per slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from trt_kvcache.model import AttentionConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config
from trt_kvcache.torch_engine.fused_projections import fused
from trt_kvcache.torch_engine.mlp import Mlp
from trt_kvcache.torch_engine.norm import TorchNorm
from trt_kvcache.torch_engine.operations import Convolution, DeltaGates, HeadCounts, Operations, StateSpace, TorchProjection, scaled
from trt_kvcache.torch_engine.per_layer_input import PerLayerInput
from trt_kvcache.torch_engine.routed_mlp import RoutedMlp
from trt_kvcache.torch_engine.stored_weights import StoredWeights


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Attention. ``inputs``: the heads of q, of k and v if the layer stores them (of k alone if it is v), then of an output gate.

    ``sinks``: float32 ``[Hq]``. Absent norms and sinks are None.
    """

    index: int
    config: AttentionConfig
    inputs: TorchProjection
    q_norm: TorchNorm | None
    k_norm: TorchNorm | None
    sinks: torch.Tensor | None
    o: TorchProjection

    @classmethod
    def of(cls, index: int, config: AttentionConfig, stored: StoredWeights) -> SelfAttention:
        """Return attention layer ``index`` with stored weights."""
        q_norm, k_norm = (
            None if config.qk_norm is None or norm is None else TorchNorm.of(config.qk_norm.norm, norm)
            for norm in (stored.q_norm, stored.k_norm)
        )
        kv = ("k",) if config.values_are_keys else ("k", "v")
        inputs = fused(stored, "q", *(kv if config.stores_kv else ()), *(("output_gate",) if config.output_gate else ()))
        sinks = stored["sinks"].float() if config.sinks else None
        return cls(index=index, config=config, inputs=inputs, q_norm=q_norm, k_norm=k_norm, sinks=sinks, o=fused(stored, "o"))

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Write K and V of the new tokens into the cache and return the output."""
        config, project = self.config, operations.projections.project
        qkv = project(self.inputs, scaled(normed, config.input_multiplier))
        gate: torch.Tensor | None = None
        if config.output_gate:
            gate_width = config.num_heads * config.head_dim
            qkv, gate = qkv[..., :-gate_width], qkv[..., -gate_width:]
        heads = qkv.unflatten(2, (-1, config.head_dim))
        if config.values_are_keys:
            heads = torch.cat((heads, heads[:, :, config.num_heads :]), dim=2)
        if config.rotates_before_norm:
            heads = operations.rotation(self.index, heads)
        if self.q_norm is not None or config.v_norm_epsilon is not None:
            counts = HeadCounts(config.num_heads, config.num_kv_heads if config.stores_kv else 0)
            heads = operations.elementwise.norm_heads(heads, counts, self.q_norm, self.k_norm, config.v_norm_epsilon)
        attended = operations.attention(self.index, heads, self.sinks).flatten(2)
        return project(self.o, attended if gate is None else attended * gate.sigmoid())


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """A gated short convolution."""

    index: int
    conv_in: TorchProjection
    conv: Convolution
    conv_out: TorchProjection

    @classmethod
    def of(cls, index: int, stored: StoredWeights) -> ShortConvolution:
        """Return recurrent layer ``index`` with stored weights."""
        conv_in, conv_out = (fused(stored, name) for name in ("conv_in", "conv_out"))
        return cls(index=index, conv_in=conv_in, conv=_convolution(stored), conv_out=conv_out)

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Write the state and return the output."""
        project = operations.projections.project
        b, c, x = project(self.conv_in, normed).chunk(3, dim=2)
        return project(self.conv_out, operations.states.convolve(self.index, x, self.conv, gate_in=b, gate_out=c))


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2. ``factors``: of the outputs of ``mamba_in``, or None for 1. ``norm``: the weight ``[inner]`` of the norm, or None."""

    index: int
    config: Mamba2Config
    mamba_in: TorchProjection
    factors: torch.Tensor | None
    conv: Convolution
    space: StateSpace
    norm: torch.Tensor | None
    mamba_out: TorchProjection

    @classmethod
    def of(cls, index: int, config: Mamba2Config, stored: StoredWeights) -> Mamba2:
        """Return recurrent layer ``index`` with stored weights."""
        space = StateSpace(
            a=-stored["a_log"].float().exp(),
            d=stored["d"].float(),
            dt_bias=stored["dt_bias"].float(),
            dt_limits=(config.dt_min, math.inf if config.dt_max is None else config.dt_max),
        )
        conv = _convolution(stored)
        factors = config.projection_factors(str(conv.weight.dtype).removeprefix("torch."))
        return cls(
            index=index,
            config=config,
            mamba_in=fused(stored, "mamba_in"),
            factors=None if factors is None else torch.from_numpy(factors.astype(np.float32)).to(conv.weight),
            conv=conv,
            space=space,
            norm=stored.get("mamba_norm.weight"),
            mamba_out=fused(stored, "mamba_out"),
        )

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Write both states and return the output."""
        config, states, project = self.config, operations.states, operations.projections.project
        projected = project(self.mamba_in, scaled(normed, config.input_multiplier))
        if self.factors is not None:
            projected = projected.mul_(self.factors)
        gate, mixed, dt = projected.split([config.inner, config.channels, config.num_heads], dim=2)
        shared = config.num_groups * config.state_size
        x, b, c = states.convolve(self.index, mixed, self.conv, silu=True).split([config.inner, shared, shared], dim=2)
        b, c = (part.unflatten(2, (config.num_groups, -1)) for part in (b, c))
        scanned = states.scan(self.index, x.unflatten(2, (config.num_heads, -1)), dt, b, c, self.space).flatten(2)
        if self.norm is None or config.norm is None:
            return project(self.mamba_out, operations.elementwise.gated(torch.cat((gate, scanned), dim=2), "silu"))
        size, eps, gate_first = config.inner // config.num_groups, config.norm.epsilon, config.gate_first
        return project(self.mamba_out, states.gated_norm(scanned, gate, self.norm, group_size=size, gate_first=gate_first, eps=eps))


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """A gated delta net. ``inputs``: the rows of q, k and v, of the gate, of b and of a. ``norm``: the weight ``[value_head_dim]``."""

    index: int
    config: GatedDeltaNetConfig
    inputs: TorchProjection
    conv: Convolution
    gates: DeltaGates
    norm: torch.Tensor
    delta_out: TorchProjection

    @classmethod
    def of(cls, index: int, config: GatedDeltaNetConfig, stored: StoredWeights) -> GatedDeltaNet:
        """Return recurrent layer ``index`` with stored weights."""
        inputs = fused(stored, *(f"delta_{name}" for name in ("qkv", "z", "b", "a")))
        gates = DeltaGates(decay=-stored["a_log"].float().exp(), dt_bias=stored["dt_bias"].float())
        norm, delta_out = stored["delta_norm.weight"], fused(stored, "delta_out")
        return cls(index=index, config=config, inputs=inputs, conv=_convolution(stored), gates=gates, norm=norm, delta_out=delta_out)

    def __call__(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        """Write both states and return the output."""
        config, states, project = self.config, operations.states, operations.projections.project
        sizes = [config.channels, config.value_width, config.num_value_heads, config.num_value_heads]
        qkv, gate, b, a = project(self.inputs, normed).split(sizes, dim=2)
        widths = [config.key_width, config.key_width, config.value_width]
        q, k, v = states.convolve(self.index, qkv, self.conv, silu=True).split(widths, dim=2)
        q, k = (part.unflatten(2, (config.num_key_heads, -1)) for part in (q, k))
        ruled = states.delta_rule(self.index, q, k, v.unflatten(2, (config.num_value_heads, -1)), a, b, self.gates).flatten(2)
        group_size, eps = config.value_head_dim, config.norm.epsilon
        return project(self.delta_out, states.gated_norm(ruled, gate, self.norm, group_size=group_size, gate_first=False, eps=eps))


#: A mixer, an MLP or a per-layer input: the part between two sums of the residual stream.
Part = Mlp | RoutedMlp | PerLayerInput | SelfAttention | ShortConvolution | Mamba2 | GatedDeltaNet


def _convolution(stored: StoredWeights) -> Convolution:
    return Convolution(weight=stored["conv.weight"].squeeze(1), bias=stored.get("conv.bias"))
