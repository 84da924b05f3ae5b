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
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams
from trt_kvcache.memory.host_memory import HostMemory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.model.recurrent_config import ShortConvConfig
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
