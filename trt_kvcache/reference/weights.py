"""Weights of a decoder as float32 arrays with the values that an engine of a given dtype has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint import decoder_weights as generic
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.decoder_weights import RoundedTensors, decoder_weights
from trt_kvcache.model.tensor_shapes import HEAD, embedding_name, shared_tensors

Float32 = npt.NDArray[np.float32]
Projection = generic.Projection[Float32]
NormWeights = generic.NormWeights[Float32]
MergeWeights = generic.MergeWeights[Float32]
DecoderLayerWeights = generic.DecoderLayerWeights[Float32]
DecoderWeights = generic.DecoderWeights[Float32]


def load_weights(
    checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None = None, *, shared: DecoderWeights | None = None
) -> DecoderWeights:
    """Read the weights of a checkpoint as float32, rounded to ``dtype``. float32 weights in a float32 engine are not copied.

    ``shared``: weights of the model of which the checkpoint is a draft head.
    """
    rounded = RoundedTensors(checkpoint, dtype, progress)
    of_model = {} if shared is None else {embedding_name(checkpoint.config): shared.embedding, HEAD: shared.head}
    known = {name: of_model[name] for name in shared_tensors(checkpoint.config) if name in of_model}
    weights = decoder_weights(checkpoint.config, lambda name: known[name] if name in known else np.asarray(rounded(name), np.float32))
    if checkpoint.config.assistant_input is not None and shared is not None:
        return replace(weights, embedding=shared.embedding)
    return replace(weights, head=known.get(HEAD, weights.head))
