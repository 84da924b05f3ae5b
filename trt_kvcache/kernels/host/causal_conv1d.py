"""The short convolution of recurrent layers in NumPy, in float32: what ``plugins/recurrent/causal_conv1d.cu`` computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of, new_counts
from trt_kvcache.kernels.recurrent_params import CausalConv1dParams


def causal_conv1d(params: CausalConv1dParams, stream: Any) -> None:
    x, past, present, out = (array_of(tensor) for tensor in (params.x, params.past, params.present, params.out))
    weight = array_of(params.weight).astype(np.float32)
    bias = None if params.bias is None else array_of(params.bias).astype(np.float32)
    gate_in, gate_out = (None if gate is None else array_of(gate) for gate in (params.gate_in, params.gate_out))
    width = weight.shape[1]
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        new = x[slot, :count].astype(np.float32)
        if gate_in is not None:
            new = (new * gate_in[slot, :count].astype(np.float32)).astype(x.dtype).astype(np.float32)
        inputs = np.concatenate([past[slot].T.astype(np.float32), new])
        sums = inputs[width:] * weight[:, -1]
        if bias is not None:
            sums += bias
        for column in range(width - 1):
            sums += inputs[column + 1 : column + 1 + count] * weight[:, column]
        if params.silu:
            sums /= 1 + np.exp(-sums)
        if gate_out is not None:
            sums *= gate_out[slot, :count].astype(np.float32)
        out[slot, :count] = sums
        present[slot] = inputs[count:].T
