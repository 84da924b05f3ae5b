"""Recurrent mixers of the reference engine: they read the states before a step, and write the states after it.

They compute with the NumPy twins of the kernels, in float32 whatever the dtype of weights and states. Shapes: A slots, s tokens per slot;
tokens past the new ones of a slot are padding and have no effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trt_kvcache.cache.recurrent_states import StateKind
from trt_kvcache.kernels.causal_conv1d_kernels import CausalConv1dParams, causal_conv1d_kernel
from trt_kvcache.kernels.delta_rule_kernels import DeltaRuleParams, gated_delta_rule_kernel
from trt_kvcache.kernels.gated_norm_kernels import GatedNormParams, gated_rms_norm_kernel
from trt_kvcache.kernels.mamba2_kernels import Mamba2Params, mamba2_scan_kernel
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.norm_config import NormConfig
from trt_kvcache.model.recurrent_config import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig, ShortConvConfig
from trt_kvcache.reference.activations import silu
from trt_kvcache.reference.model import project, scaled
from trt_kvcache.reference.weights import DecoderLayerWeights, Float32

#: States of a layer before and after a step, ``[A, ...]``.
LayerStates = Mapping[StateKind, tuple[DeviceTensor, DeviceTensor]]

MixerT = TypeVar("MixerT", bound=RecurrentConfig)


class Recurrence(ABC, Generic[MixerT]):
    """A recurrent mixer of one layer in one step; base class with the convolution, the norm, and views of arrays."""

    def __init__(self, mixer: MixerT, states: LayerStates, new_lengths: DeviceTensor, stream: Any) -> None:
        memory = new_lengths.memory
        assert isinstance(memory, HostMemory)
        self._memory = memory
        self._mixer = mixer
        self._states = states
        self._new_lengths = new_lengths
        self._stream = stream

    @abstractmethod
    def __call__(self, weights: DecoderLayerWeights, hidden: Float32) -> Float32:
        """Return the output ``[A, s, hidden]`` for the normalised input of that shape, and write the states."""

    def _tensor(self, array: npt.NDArray[Any]) -> DeviceTensor:
        return self._memory.to_device(np.ascontiguousarray(array), stream=self._stream)

    def _optional(self, array: npt.NDArray[Any] | None) -> DeviceTensor | None:
        return None if array is None else self._tensor(array)

    def _convolve(
        self, weights: DecoderLayerWeights, x: Float32, *, silu: bool, gate_in: Float32 | None = None, gate_out: Float32 | None = None
    ) -> Float32:
        """Return the convolution of ``x`` ``[A, s, channels]``, with gates of its input and output."""
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
        causal_conv1d_kernel(call, self._stream)
        convolved: Float32 = self._memory.array(out)
        return convolved

    def _gated_norm(self, x: Float32, gate: Float32, weight: Float32, norm: NormConfig, *, group_size: int, gate_first: bool) -> Float32:
        """Return the norm of column groups of ``x`` ``[A, s, columns]``, times the SiLU of the gate before or after it."""
        out = self._tensor(x)
        call = GatedNormParams(
            x=self._tensor(x),
            gate=self._tensor(gate),
            weight=self._tensor(weight),
            out=out,
            group_size=group_size,
            gate_first=gate_first,
            eps=norm.epsilon,
            new_lengths=self._new_lengths,
        )
        gated_rms_norm_kernel(call, self._stream)
        normed: Float32 = self._memory.array(out)
        return normed


class ShortConvolution(Recurrence[ShortConvConfig]):
    """The short convolution of one layer in one step: a :class:`Recurrence`."""

    def __call__(self, weights: DecoderLayerWeights, hidden: Float32) -> Float32:
        """Return ``out(c * conv(b * x))``, and write the state of the convolution."""
        b, c, x = np.split(project(weights.projection("conv_in"), hidden), 3, axis=-1)
        return project(weights.projection("conv_out"), self._convolve(weights, x, silu=False, gate_in=b, gate_out=c))


class Mamba2(Recurrence[Mamba2Config]):
    """Mamba-2 of one layer in one step: a :class:`Recurrence`."""

    def __call__(self, weights: DecoderLayerWeights, hidden: Float32) -> Float32:
        """Return ``out(norm(scan(x, b, c, dt) * silu(z)))``, with the norm where the model has it, and write both states."""
        mixer = self._mixer
        projected = project(weights.projection("mamba_in"), scaled(hidden, mixer.input_multiplier))
        factors = mixer.projection_factors(self._states[StateKind.CONV][0].dtype)
        if factors is not None:
            projected *= factors.astype(np.float32)
        gate, mixed, dt = np.split(projected, [mixer.inner, mixer.inner + mixer.channels], axis=-1)
        mixed = self._convolve(weights, mixed, silu=True)
        x, b, c = np.split(mixed, [mixer.inner, mixer.inner + mixer.num_groups * mixer.state_size], axis=-1)
        scanned = self._scan(weights, x, b, c, dt)
        if mixer.norm is None:
            return project(weights.projection("mamba_out"), scanned * silu(gate))
        size, weight = mixer.inner // mixer.num_groups, weights["mamba_norm.weight"]
        normed = self._gated_norm(scanned, gate, weight, mixer.norm, group_size=size, gate_first=mixer.gate_first)
        return project(weights.projection("mamba_out"), normed)

    def _scan(self, weights: DecoderLayerWeights, x: Float32, b: Float32, c: Float32, dt: Float32) -> Float32:
        """Return the scan of ``x``, of the same shape, and write the recurrent state."""
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
        mamba2_scan_kernel(call, self._stream)
        scanned: Float32 = self._memory.array(out).reshape(x.shape)
        return scanned


class GatedDeltaNet(Recurrence[GatedDeltaNetConfig]):
    """The gated delta net of one layer in one step: a :class:`Recurrence`."""

    def __call__(self, weights: DecoderLayerWeights, hidden: Float32) -> Float32:
        """Return ``out(norm(rule(q, k, v, a, b)) * silu(z))``, and write both states."""
        mixer = self._mixer
        qkv, gate, b, a = (project(weights.projection(f"delta_{name}"), hidden) for name in ("qkv", "z", "b", "a"))
        q, k, v = np.split(self._convolve(weights, qkv, silu=True), [mixer.key_width, 2 * mixer.key_width], axis=-1)
        ruled = self._delta_rule(weights, q, k, v, a, b)
        size = mixer.value_head_dim
        normed = self._gated_norm(ruled, gate, weights["delta_norm.weight"], mixer.norm, group_size=size, gate_first=False)
        return project(weights.projection("delta_out"), normed)

    def _delta_rule(self, weights: DecoderLayerWeights, q: Float32, k: Float32, v: Float32, a: Float32, b: Float32) -> Float32:
        """Return the delta rule of ``v``, of the same shape, and write the recurrent state."""
        mixer, tokens = self._mixer, v.shape[:2]
        past, present = self._states[StateKind.RECURRENT]
        keys, values = (mixer.num_key_heads, mixer.key_head_dim), (mixer.num_value_heads, mixer.value_head_dim)
        out = self._tensor(v.reshape(*tokens, *values))
        call = DeltaRuleParams(
            q=self._tensor(q.reshape(*tokens, *keys)),
            k=self._tensor(k.reshape(*tokens, *keys)),
            v=self._tensor(v.reshape(*tokens, *values)),
            a=self._tensor(a),
            b=self._tensor(b),
            past=past,
            decay=self._tensor(-np.exp(weights["a_log"])),
            present=present,
            out=out,
            dt_bias=self._tensor(weights["dt_bias"]),
            new_lengths=self._new_lengths,
        )
        gated_delta_rule_kernel(call, self._stream)
        ruled: Float32 = self._memory.array(out).reshape(v.shape)
        return ruled


#: Recurrences by kind of mixer.
_RECURRENCES: dict[str, type[Recurrence[Any]]] = {
    ShortConvConfig.kind: ShortConvolution,
    Mamba2Config.kind: Mamba2,
    GatedDeltaNetConfig.kind: GatedDeltaNet,
}


def layer_recurrence(mixer: RecurrentConfig, states: LayerStates, new_lengths: DeviceTensor, stream: Any) -> Recurrence[Any]:
    """Return the :class:`Recurrence` of a mixer."""
    return _RECURRENCES[mixer.kind](mixer, states, new_lengths, stream)
