"""The weights of a decoder as float32 arrays that hold the values an engine of a given dtype has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Projection:
    """A linear map.

    Parameters
    ----------
    weight : ndarray float32 ``[out, in]``
        The matrix.
    bias : ndarray float32 ``[out]``, or None
        Added to every row, if there is one.
    """

    weight: Float32
    bias: Float32 | None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Norms are float32 ``[hidden]``, those of q and k ``[head_dim]`` or None."""

    input_norm: Float32
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    q_norm: Float32 | None
    k_norm: Float32 | None
    post_attention_norm: Float32
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """A whole decoder. ``embedding`` and ``head`` are float32 ``[vocab, hidden]``, one array where they are tied."""

    embedding: Float32
    layers: tuple[LayerWeights, ...]
    final_norm: Float32
    head: Float32


def load_weights(checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None = None) -> DecoderWeights:
    """Read the weights of a checkpoint, rounded to ``dtype``, as float32.

    Parameters
    ----------
    checkpoint : Checkpoint
        An open checkpoint.
    dtype : {"float16", "bfloat16", "float32"}
        The precision of the engine. Weights that are stored in float32 and used in float32 are not copied.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` while the weights are read.

    Returns
    -------
    DecoderWeights
        All weights on the host, as arrays that are float32 and hold only values of ``dtype``.

    Raises
    ------
    CheckpointError
        A weight has no finite value in ``dtype``.
    """
    loader = _Loader(checkpoint, dtype, progress)
    config = checkpoint.config
    embedding = loader.array(EMBEDDING)
    layers = tuple(_load_layer(loader, f"model.layers.{layer}.") for layer in range(config.num_layers))
    final_norm = loader.array(FINAL_NORM)
    head = embedding if config.tie_word_embeddings else loader.array(HEAD)
    return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def _load_layer(loader: _Loader, prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LayerWeights(
        input_norm=loader.array(prefix + "input_layernorm.weight"),
        q=loader.projection(attention + "q_proj"),
        k=loader.projection(attention + "k_proj"),
        v=loader.projection(attention + "v_proj"),
        o=loader.projection(attention + "o_proj"),
        q_norm=loader.optional(attention + "q_norm.weight"),
        k_norm=loader.optional(attention + "k_norm.weight"),
        post_attention_norm=loader.array(prefix + "post_attention_layernorm.weight"),
        gate=loader.projection(mlp + "gate_proj"),
        up=loader.projection(mlp + "up_proj"),
        down=loader.projection(mlp + "down_proj"),
    )


class _Loader:
    """Converts tensors one by one and counts the bytes that were read."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None) -> None:
        self._checkpoint = checkpoint
        self._names = frozenset(checkpoint.tensor_names)
        self._dtype = numpy_dtype(dtype)
        self._progress = progress
        self._done, self._total = 0, checkpoint.nbytes

    def array(self, name: str) -> Float32:
        stored = self._checkpoint.tensor(name)
        values = np.asarray(self._rounded(name, stored), np.float32)
        self._done += stored.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return values

    def optional(self, name: str) -> Float32 | None:
        return self.array(name) if name in self._names else None

    def projection(self, name: str) -> Projection:
        return Projection(self.array(f"{name}.weight"), self.optional(f"{name}.bias"))

    def _rounded(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if np.can_cast(stored.dtype, self._dtype):
            return stored
        with np.errstate(over="ignore"):
            rounded = stored.astype(self._dtype)
        if not np.isfinite(rounded).all():
            raise CheckpointError(f"{self._checkpoint.path}: {name} has values that {self._dtype} cannot hold. Choose another dtype.")
        return rounded
