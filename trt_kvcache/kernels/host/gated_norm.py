"""RMS norm with a gate in NumPy, in float32: what ``plugins/recurrent/gated_norm.cu`` computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of, new_counts
from trt_kvcache.kernels.recurrent_params import GatedNormParams


def gated_rms_norm(params: GatedNormParams, stream: Any) -> None:
    x, gate, out = (array_of(tensor) for tensor in (params.x, params.gate, params.out))
    columns, size = x.shape[2], params.group_size
    weight = np.resize(array_of(params.weight).astype(np.float32), columns)
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        values, gates = (array[slot, :count].astype(np.float32) for array in (x, gate))
        gates /= 1 + np.exp(-gates)
        if params.gate_first:
            values *= gates
        groups = values.reshape(count, columns // size, size)
        normed = groups / np.sqrt((groups * groups).mean(axis=2, keepdims=True) + np.float32(params.eps))
        normed = normed.reshape(count, columns) * weight
        out[slot, :count] = normed if params.gate_first else normed * gates
        out[slot, count:] = 0
