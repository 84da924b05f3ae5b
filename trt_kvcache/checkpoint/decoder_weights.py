"""``DecoderWeights``: the weights of a decoder by what they are for, in the arrays of whatever computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD
from trt_kvcache.model.weight_parts import layer_parts

ArrayT = TypeVar("ArrayT")


@dataclass(frozen=True)
class Projection(Generic[ArrayT]):
    """A linear map.

    Parameters
    ----------
    weight : array ``[out, in]``
        The matrix.
    bias : array ``[out]``, or None
        Added to every row, if there is one.
    """

    weight: ArrayT
    bias: ArrayT | None


@dataclass(frozen=True, kw_only=True)
class LayerWeights(Generic[ArrayT]):
    """One decoder layer: see :class:`~trt_kvcache.model.LayerConfig`. Norms that the layer does not have are None.

    Norms of the hidden state are ``[hidden]``. Those of q and k are ``[head_dim]``, or as wide as q and k.
    """

    input_norm: ArrayT | None
    q: Projection[ArrayT]
    k: Projection[ArrayT]
    v: Projection[ArrayT]
    o: Projection[ArrayT]
    q_norm: ArrayT | None
    k_norm: ArrayT | None
    mixer_output_norm: ArrayT | None
    mlp_norm: ArrayT | None
    gate: Projection[ArrayT]
    up: Projection[ArrayT]
    down: Projection[ArrayT]
    mlp_output_norm: ArrayT | None


@dataclass(frozen=True, kw_only=True)
class DecoderWeights(Generic[ArrayT]):
    """A whole decoder. ``embedding`` and ``head`` are ``[vocab, hidden]``, one array where they are tied."""

    embedding: ArrayT
    layers: tuple[LayerWeights[ArrayT], ...]
    final_norm: ArrayT
    head: ArrayT


def decoder_weights(config: ModelConfig, tensor: Callable[[str], ArrayT]) -> DecoderWeights[ArrayT]:
    """Collect the weights of a model.

    Parameters
    ----------
    config : ModelConfig
        The model. It says which biases and norms there are.
    tensor : callable
        Called once with the name of each tensor, as Hugging Face transformers names it; returns the array.

    Returns
    -------
    DecoderWeights
        Of what ``tensor`` returned; a weight that shares a tensor with others is a view of its rows.
    """
    embedding = tensor(EMBEDDING)
    layers = tuple(layer_weights(config, index, tensor) for index in range(config.num_layers))
    final_norm = tensor(FINAL_NORM)
    head = embedding if config.tie_word_embeddings else tensor(HEAD)
    return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def layer_weights(config: ModelConfig, index: int, tensor: Callable[[str], ArrayT]) -> LayerWeights[ArrayT]:
    """Collect the weights of one layer: see :func:`decoder_weights`."""
    parts = layer_parts(config, index)
    tensors = {name: tensor(name) for name in dict.fromkeys(part.tensor for part in parts.values())}

    def optional(role: str) -> ArrayT | None:
        part = parts.get(role)
        if part is None:
            return None
        whole = tensors[part.tensor]
        return whole if part.is_whole else whole[part.rows]  # type: ignore[index]  # arrays can be sliced

    def projection(name: str) -> Projection[ArrayT]:
        weight = optional(f"{name}.weight")
        assert weight is not None
        return Projection(weight, optional(f"{name}.bias"))

    return LayerWeights(
        input_norm=optional("input_norm.weight"),
        q=projection("q"),
        k=projection("k"),
        v=projection("v"),
        o=projection("o"),
        q_norm=optional("q_norm.weight"),
        k_norm=optional("k_norm.weight"),
        mixer_output_norm=optional("mixer_output_norm.weight"),
        mlp_norm=optional("mlp_norm.weight"),
        gate=projection("gate"),
        up=projection("up"),
        down=projection("down"),
        mlp_output_norm=optional("mlp_output_norm.weight"),
    )


class RoundedTensors:
    """The tensors of a checkpoint, rounded to a dtype, one by one.

    Parameters
    ----------
    checkpoint : Checkpoint
        An open checkpoint.
    dtype : {"float16", "bfloat16", "float32"}
        The precision of the engine.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)`` with each tensor.

    Attributes
    ----------
    dtype : numpy.dtype
        What values are rounded to.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None = None) -> None:
        self._checkpoint = checkpoint
        self.dtype = numpy_dtype(dtype)
        self._progress = progress
        self._done, self._total = 0, checkpoint.nbytes

    def __call__(self, name: str) -> npt.NDArray[Any]:
        """Return one tensor.

        Parameters
        ----------
        name : str
            As Hugging Face transformers names it.

        Returns
        -------
        ndarray
            Read-only, in the dtype, or in a narrower one that is stored and that the dtype holds exactly. Not copied where the
            stored values need no rounding.

        Raises
        ------
        CheckpointError
            The tensor has no finite value in the dtype.
        """
        stored = self._checkpoint.tensor(name)
        values = self._rounded(name, stored)
        self._done += stored.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return values

    def _rounded(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if np.can_cast(stored.dtype, self.dtype):
            return stored
        with np.errstate(over="ignore"):
            rounded = stored.astype(self.dtype)
        if not np.isfinite(rounded).all():
            raise CheckpointError(f"{self._checkpoint.path}: {name} has values that {self.dtype} cannot hold. Choose another dtype.")
        return rounded
