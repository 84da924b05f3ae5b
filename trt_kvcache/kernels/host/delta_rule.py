"""The gated delta rule in NumPy, in float32, token by token: what ``plugins/recurrent/delta_rule.cu`` computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import Array, array_of, new_counts
from trt_kvcache.kernels.recurrent_params import DeltaRuleParams

#: Added to the squared norms of q and k.
_NORM_EPSILON = np.float32(1e-6)


def _normed(rows: Array) -> Array:
    """Divide rows by their L2 norms, in float32."""
    wide: Array = rows.astype(np.float32)
    normed: Array = wide / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) + _NORM_EPSILON)
    return normed


def gated_delta_rule(params: DeltaRuleParams, stream: Any) -> None:
    q, k, v, a, b = (array_of(tensor) for tensor in (params.q, params.k, params.v, params.a, params.b))
    past, present, out = (array_of(tensor) for tensor in (params.past, params.present, params.out))
    heads, key_dim = v.shape[2], q.shape[3]
    key_head = np.arange(heads) * q.shape[2] // heads  # of each head
    bias = 0 if params.dt_bias is None else array_of(params.dt_bias)
    for slot, count in enumerate(new_counts(params.new_lengths, q)):
        out[slot, count:] = 0
        if not count:
            present[slot] = past[slot]
            continue
        queries, keys = (_normed(rows[slot, :count])[:, key_head] for rows in (q, k))
        values = v[slot, :count].astype(np.float32)
        decays = np.exp(array_of(params.decay) * np.logaddexp(0, a[slot, :count].astype(np.float32) + bias))
        betas = 1 / (1 + np.exp(-b[slot, :count].astype(np.float32)))
        outputs = np.empty_like(values)
        state = past[slot].astype(np.float32)
        for token in range(count):
            state *= decays[token, :, None, None]
            change = betas[token, :, None] * (values[token] - (keys[token, :, None] @ state)[:, 0])
            state += keys[token, :, :, None] * change[:, None]
            outputs[token] = (queries[token, :, None] @ state)[:, 0]
        out[slot, :count] = outputs / np.sqrt(np.float32(key_dim))
        present[slot] = state
