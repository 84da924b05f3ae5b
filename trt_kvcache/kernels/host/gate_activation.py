"""Activations of the gate of an MLP, in host memory. Each is x times a sigmoid."""

from collections.abc import Callable

import numpy as np

from trt_kvcache.kernels.host.arrays import Array

_TANH_FACTOR, _CUBE_FACTOR = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)

#: What the sigmoid is of.
_SIGMOID_INPUTS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x,
    "gelu_tanh": lambda x: _TANH_FACTOR * (x + _CUBE_FACTOR * x * x * x),
}


def gated(activation: str, gate_up: Array) -> Array:
    """Return ``activation(gate) * up`` of float32 ``[rows, 2 * columns]``."""
    gate, up = np.split(gate_up, 2, axis=1)
    with np.errstate(over="ignore"):  # far below 0, where what it divides becomes 0
        product: Array = gate / (1 + np.exp(-_SIGMOID_INPUTS[activation](gate))) * up
    return product
