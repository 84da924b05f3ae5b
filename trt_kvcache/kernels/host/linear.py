"""Products of a few rows with a matrix of weights, in host memory."""

from typing import Any

import numpy as np

from trt_kvcache.kernels.host.arrays import Array, array_of
from trt_kvcache.kernels.host.gate_activation import gated
from trt_kvcache.memory.tensor import DeviceTensor

#: Rows of weights that are widened to float32 at once.
_OUTPUTS_AT_ONCE = 4096


def linear(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any) -> None:
    array_of(out)[...] = _product(x, weight, bias)


def linear_gated_mul(
    activation: str, x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None, out: DeviceTensor, stream: Any
) -> None:
    array_of(out)[...] = gated(activation, _product(x, weight, bias))


def _product(x: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor | None) -> Array:
    """Return the product in float32."""
    rows, weights = array_of(x).astype(np.float32), array_of(weight)
    out = np.empty((len(rows), len(weights)), np.float32)
    for first in range(0, len(weights), _OUTPUTS_AT_ONCE):
        some = slice(first, first + _OUTPUTS_AT_ONCE)
        np.matmul(rows, weights[some].astype(np.float32).T, out=out[:, some])
    return out if bias is None else out + array_of(bias).astype(np.float32)
