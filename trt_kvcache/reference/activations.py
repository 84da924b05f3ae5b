"""Activations of MLPs and gates in float32."""

import math
from collections.abc import Callable

import numpy as np

from trt_kvcache.model import ClampedSwiGLU
from trt_kvcache.reference.weights import Float32


def sigmoid(x: Float32) -> Float32:
    """Return ``1 / (1 + exp(-x))``."""
    activated: Float32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return activated


def silu(x: Float32) -> Float32:
    """Return ``x * sigmoid(x)``."""
    activated: Float32 = x / (np.float32(1) + np.exp(-x))
    return activated


def relu2(x: Float32) -> Float32:
    """Return the square of ``x`` where that is positive, else 0."""
    activated: Float32 = np.square(np.maximum(x, 0))
    return activated


def gelu_tanh(x: Float32) -> Float32:
    """Return GELU in its tanh approximation."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    activated: Float32 = np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return activated


def clamped_swiglu(config: ClampedSwiGLU, gate: Float32, up: Float32) -> Float32:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)``, after both are clamped."""
    limit = np.float32(config.limit)
    gate = np.minimum(gate, limit)
    activated: Float32 = gate * sigmoid(np.float32(config.alpha) * gate) * (np.clip(up, -limit, limit) + np.float32(1))
    return activated


#: Activations by their names in configurations.
ACTIVATIONS: dict[str, Callable[[Float32], Float32]] = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu2}
