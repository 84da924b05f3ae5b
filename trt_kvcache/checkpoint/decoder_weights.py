"""``DecoderWeights``: the weights of a decoder by what they are for, in the arrays of whatever computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.checkpoint.model_config import ModelConfig
from trt_kvcache.checkpoint.tensor_shapes import EMBEDDING, FINAL_NORM, HEAD, tensor_shapes
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError

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
    """One decoder layer. Norms are ``[hidden]``, those of q and k ``[head_dim]`` or None."""

    input_norm: ArrayT
    q: Projection[ArrayT]
    k: Projection[ArrayT]
    v: Projection[ArrayT]
    o: Projection[ArrayT]
    q_norm: ArrayT | None
    k_norm: ArrayT | None
    post_attention_norm: ArrayT
    gate: Projection[ArrayT]
    up: Projection[ArrayT]
    down: Projection[ArrayT]


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
        Of what ``tensor`` returned.
    """
    embedding = tensor(EMBEDDING)
    layers = tuple(layer_weights(config, index, tensor) for index in range(config.num_layers))
    final_norm = tensor(FINAL_NORM)
    head = embedding if config.tie_word_embeddings else tensor(HEAD)
    return DecoderWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def layer_weights(config: ModelConfig, index: int, tensor: Callable[[str], ArrayT]) -> LayerWeights[ArrayT]:
    """Collect the weights of one layer: see :func:`decoder_weights`."""
    names = frozenset(tensor_shapes(config))
    prefix = f"model.layers.{index}."

    def optional(name: str) -> ArrayT | None:
        return tensor(prefix + name) if prefix + name in names else None

    def projection(name: str) -> Projection[ArrayT]:
        return Projection(tensor(f"{prefix}{name}.weight"), optional(f"{name}.bias"))

    return LayerWeights(
        input_norm=tensor(prefix + "input_layernorm.weight"),
        q=projection("self_attn.q_proj"),
        k=projection("self_attn.k_proj"),
        v=projection("self_attn.v_proj"),
        o=projection("self_attn.o_proj"),
        q_norm=optional("self_attn.q_norm.weight"),
        k_norm=optional("self_attn.k_norm.weight"),
        post_attention_norm=tensor(prefix + "post_attention_layernorm.weight"),
        gate=projection("mlp.gate_proj"),
        up=projection("mlp.up_proj"),
        down=projection("mlp.down_proj"),
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
