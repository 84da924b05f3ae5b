"""Weights of a decoder as float32 arrays with the values that an engine of a given dtype has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint import decoder_weights as generic
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors, decoder_weights

Float32 = npt.NDArray[np.float32]
Projection = generic.Projection[Float32]
NormWeights = generic.NormWeights[Float32]
DecoderLayerWeights = generic.DecoderLayerWeights[Float32]
DecoderWeights = generic.DecoderWeights[Float32]


def load_weights(checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None = None) -> DecoderWeights:
    """Read the weights of a checkpoint as float32, rounded to ``dtype``. float32 weights in a float32 engine are not copied."""
    rounded = RoundedTensors(checkpoint, dtype, progress)
    return decoder_weights(checkpoint.config, lambda name: np.asarray(rounded(name), np.float32))
