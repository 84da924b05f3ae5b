"""The selective state space of Mamba-2 in NumPy, in float32, token by token: what ``plugins/recurrent/mamba2.cu`` computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import array_of, new_counts
from trt_kvcache.kernels.recurrent_params import Mamba2Params


def mamba2_scan(params: Mamba2Params, stream: Any) -> None:
    x, dt, past, present, out = (array_of(tensor) for tensor in (params.x, params.dt, params.past, params.present, params.out))
    heads = x.shape[2]
    group = np.arange(heads) * params.b.shape[2] // heads  # of each head
    a = array_of(params.a)
    bias = 0 if params.dt_bias is None else array_of(params.dt_bias)
    for slot, count in enumerate(new_counts(params.new_lengths, x)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        inputs = x[slot, :count].astype(np.float32)
        b, c = (array_of(tensor)[slot, :count].astype(np.float32)[:, group] for tensor in (params.b, params.c))
        steps = np.clip(np.logaddexp(0, dt[slot, :count].astype(np.float32) + bias), *map(np.float32, params.dt_limits))
        decays, scaled = np.exp(steps * a), inputs * steps[..., None]
        outputs = np.empty_like(inputs)
        state = past[slot].astype(np.float32)
        for token in range(count):
            state = state * decays[token, :, None, None] + scaled[token, :, :, None] * b[token, :, None]
            outputs[token] = (state @ c[token, :, :, None])[..., 0]
        out[slot, :count] = outputs if params.d is None else outputs + array_of(params.d)[:, None] * inputs
        present[slot] = state
