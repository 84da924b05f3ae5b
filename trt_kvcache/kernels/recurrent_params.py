"""Checked calls of the kernels of recurrent layers, as the backends take them."""

from __future__ import annotations

from dataclasses import dataclass

from trt_kvcache.memory.tensor import DeviceTensor


@dataclass(frozen=True, kw_only=True)
class CausalConv1dParams:
    """The arguments of :func:`~trt_kvcache.kernels.causal_conv1d`, checked."""

    x: DeviceTensor
    weight: DeviceTensor
    bias: DeviceTensor | None
    past: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    silu: bool
    gate_in: DeviceTensor | None
    gate_out: DeviceTensor | None
    new_lengths: DeviceTensor | None


@dataclass(frozen=True, kw_only=True)
class Mamba2Params:
    """The arguments of :func:`~trt_kvcache.kernels.mamba2_scan`, checked."""

    x: DeviceTensor
    dt: DeviceTensor
    b: DeviceTensor
    c: DeviceTensor
    past: DeviceTensor
    a: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    d: DeviceTensor | None
    dt_bias: DeviceTensor | None
    dt_limits: tuple[float, float]
    new_lengths: DeviceTensor | None


@dataclass(frozen=True, kw_only=True)
class DeltaRuleParams:
    """The arguments of :func:`~trt_kvcache.kernels.gated_delta_rule`, checked."""

    q: DeviceTensor
    k: DeviceTensor
    v: DeviceTensor
    a: DeviceTensor
    b: DeviceTensor
    past: DeviceTensor
    decay: DeviceTensor
    present: DeviceTensor
    out: DeviceTensor
    dt_bias: DeviceTensor | None
    new_lengths: DeviceTensor | None


@dataclass(frozen=True, kw_only=True)
class GatedNormParams:
    """The arguments of :func:`~trt_kvcache.kernels.gated_rms_norm`, checked."""

    x: DeviceTensor
    gate: DeviceTensor
    weight: DeviceTensor
    out: DeviceTensor
    group_size: int
    gate_first: bool
    eps: float
    new_lengths: DeviceTensor | None
