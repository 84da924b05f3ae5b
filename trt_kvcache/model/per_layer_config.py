"""Per-layer embeddings: rows of a second embedding that each layer adds to the hidden state through a gate.

With ``e`` for the row of a token in the second embedding, ``h`` for its scaled row in the first, and ``act`` for the activation::

    inputs = (sqrt(size) * e + norm(projection(h) / sqrt(hidden_size))) / sqrt(2)    # [num_layers, size]
    x = x + output_norm(layer_projection(act(layer_gate(x)) * inputs[layer]))        # after the MLP of the layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trt_kvcache._util.checks import int_in_range, one_of
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.mlp_config import ACTIVATIONS
from trt_kvcache.model.norm_config import NormConfig


@dataclass(frozen=True, kw_only=True)
class PerLayerEmbeddingConfig:
    """The second embedding of a model, and the projection of the hidden state that is added to its rows.

    Parameters
    ----------
    vocab_size : int
        Rows of the embedding.
    size : int
        Elements of a row for each layer.
    norm : NormConfig
        Norm of the projection, of the elements of each layer alone.

    Raises
    ------
    ConfigError
        A size is out of range.
    """

    vocab_size: int
    size: int
    norm: NormConfig

    def __post_init__(self) -> None:
        for name in ("vocab_size", "size"):
            int_in_range(f"PerLayerEmbeddingConfig.{name}", getattr(self, name), 1, MAX_DIMENSION, error=ConfigError)

    def shape(self, num_layers: int) -> tuple[int, int]:
        """Return the shape of the embedding."""
        return self.vocab_size, num_layers * self.size

    def factor(self, dtype: str) -> float:
        """Return the factor of the rows of the embedding: ``sqrt(size)``, rounded to the compute dtype."""
        return float(np.asarray(math.sqrt(self.size)).astype(numpy_dtype(dtype)))


@dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig:
    """The gate of a layer for its elements of the per-layer embedding, and the projection back to the hidden state.

    Parameters
    ----------
    size : int
        Elements of the layer.
    activation : {"silu", "gelu_tanh", "relu2"}
        Activation of the gate.
    output_norm : NormConfig
        Norm of the projection back (post-norm).

    Raises
    ------
    ConfigError
        A value is out of range.
    """

    size: int
    activation: str
    output_norm: NormConfig

    def __post_init__(self) -> None:
        int_in_range("PerLayerInputConfig.size", self.size, 1, MAX_DIMENSION, error=ConfigError)
        one_of("PerLayerInputConfig.activation", self.activation, ACTIVATIONS)
