"""Mixers with states in the reference engine: they read the states before a step, and write those after it.

They compute with the NumPy twins of the kernels, in float32 whatever the dtype of weights and states. Shapes: A slots, s new tokens per
slot, of which those behind the new tokens of a slot are padding and leave no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.kernels.host.causal_conv1d import causal_conv1d
from trt_kvcache.kernels.host.gated_norm import gated_rms_norm
from trt_kvcache.kernels.host.mamba2 import mamba2_scan
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams, GatedNormParams, Mamba2Params
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.recurrent_config import Mamba2Config, ShortConvConfig
from trt_kvcache.reference.model import project
from trt_kvcache.reference.weights import Float32, LayerWeights

#: States of a layer before and after a step, ``[A, ...]``.
LayerStates = Mapping[StateKind, tuple[DeviceTensor, DeviceTensor]]


class Recurrence:
    """What the mixers with states share: arrays as tensors of host memory, and the convolution.

    Parameters
    ----------
    states : mapping
        Of the layer.
    new_lengths : DeviceTensor int32 ``[A]``
        New tokens of each slot.
    stream : HostStream
        A stream of host memory.
    """

    def __init__(self, states: LayerStates, new_lengths: DeviceTensor, stream: Any) -> None:
        memory = new_lengths.memory
        assert isinstance(memory, HostMemory)
        self._memory = memory
        self._states = states
        self._new_lengths = new_lengths
        self._stream = stream

    def _tensor(self, array: npt.NDArray[Any]) -> DeviceTensor:
        return self._memory.to_device(np.ascontiguousarray(array), stream=self._stream)

    def _optional(self, array: npt.NDArray[Any] | None) -> DeviceTensor | None:
        return None if array is None else self._tensor(array)

    def _convolved(
        self, weights: LayerWeights, x: Float32, *, silu: bool, gate_in: Float32 | None = None, gate_out: Float32 | None = None
    ) -> Float32:
        """Return the convolution of ``x`` ``[A, s, channels]``, with the gates of its inputs and outputs."""
        past, present = self._states[StateKind.CONV]
        out = self._tensor(x)
        kernel = weights["conv.weight"]
        call = CausalConv1dParams(
            x=self._tensor(x),
            weight=self._tensor(kernel.reshape(kernel.shape[0], kernel.shape[2])),
            bias=self._optional(weights.get("conv.bias")),
            past=past,
            present=present,
            out=out,
            silu=silu,
            gate_in=self._optional(gate_in),
            gate_out=self._optional(gate_out),
            new_lengths=self._new_lengths,
        )
        causal_conv1d(call, self._stream)
        convolved: Float32 = self._memory.array(out)
        return convolved


class ShortConvolution(Recurrence):
    """The short convolution of one layer in one step.

    Parameters
    ----------
    mixer : ShortConvConfig
        The mixer of the layer.
    states : mapping
        Of the layer, as for :class:`Recurrence`.
    new_lengths : DeviceTensor int32 ``[A]``
        New tokens of each slot.
    stream : HostStream
        A stream of host memory.
    """

    def __init__(self, mixer: ShortConvConfig, states: LayerStates, new_lengths: DeviceTensor, stream: Any) -> None:
        super().__init__(states, new_lengths, stream)
        self._mixer = mixer

    def __call__(self, weights: LayerWeights, hidden: Float32) -> Float32:
        """Return ``out(c * conv(b * x))`` of the normalised input ``[A, s, hidden]``, and write the state."""
        b, c, x = np.split(project(weights.projection("conv_in"), hidden), 3, axis=-1)
        return project(weights.projection("conv_out"), self._convolved(weights, x, silu=False, gate_in=b, gate_out=c))


class Mamba2(Recurrence):
    """Mamba-2 of one layer in one step.

    Parameters
    ----------
    mixer : Mamba2Config
        The mixer of the layer.
    states : mapping
        Of the layer, as for :class:`Recurrence`.
    new_lengths : DeviceTensor int32 ``[A]``
        New tokens of each slot.
    stream : HostStream
        A stream of host memory.
    """

    def __init__(self, mixer: Mamba2Config, states: LayerStates, new_lengths: DeviceTensor, stream: Any) -> None:
        super().__init__(states, new_lengths, stream)
        self._mixer = mixer

    def __call__(self, weights: LayerWeights, hidden: Float32) -> Float32:
        """Return the output ``[A, s, hidden]`` for the normalised input, and write both states."""
        mixer = self._mixer
        projected = project(weights.projection("mamba_in"), hidden)
        gate, mixed, dt = np.split(projected, [mixer.inner, mixer.inner + mixer.channels], axis=-1)
        mixed = self._convolved(weights, mixed, silu=True)
        x, b, c = np.split(mixed, [mixer.inner, mixer.inner + mixer.num_groups * mixer.state_size], axis=-1)
        scanned = self._scanned(weights, x, b, c, dt)
        out = self._tensor(scanned)
        call = GatedNormParams(
            x=self._tensor(scanned),
            gate=self._tensor(gate),
            weight=self._tensor(weights["mamba_norm.weight"]),
            out=out,
            group_size=mixer.inner // mixer.num_groups,
            gate_first=True,
            eps=mixer.norm.epsilon,
            new_lengths=self._new_lengths,
        )
        gated_rms_norm(call, self._stream)
        return project(weights.projection("mamba_out"), self._memory.array(out))

    def _scanned(self, weights: LayerWeights, x: Float32, b: Float32, c: Float32, dt: Float32) -> Float32:
        """Return what the scan makes of ``x``, of the same shape, and write the recurrent state."""
        mixer, tokens = self._mixer, x.shape[:2]
        past, present = self._states[StateKind.RECURRENT]
        heads = x.reshape(*tokens, mixer.num_heads, mixer.head_dim)
        groups = (*tokens, mixer.num_groups, mixer.state_size)
        out = self._tensor(heads)
        call = Mamba2Params(
            x=self._tensor(heads),
            dt=self._tensor(dt),
            b=self._tensor(b.reshape(groups)),
            c=self._tensor(c.reshape(groups)),
            past=past,
            a=self._tensor(-np.exp(weights["a_log"])),
            present=present,
            out=out,
            d=self._tensor(weights["d"]),
            dt_bias=self._tensor(weights["dt_bias"]),
            dt_limits=(mixer.dt_min, np.inf if mixer.dt_max is None else mixer.dt_max),
            new_lengths=self._new_lengths,
        )
        mamba2_scan(call, self._stream)
        scanned: Float32 = self._memory.array(out).reshape(x.shape)
        return scanned
