"""``DecoderWeights``: the weights of a decoder by role, in the array type of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from trt_kvcache._util.in_threads import for_each, row_slices
from trt_kvcache.checkpoint.checkpoint import Checkpoint
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.tensor_shapes import (
    CENTROIDS,
    HEAD,
    PER_LAYER_EMBEDDING,
    PER_LAYER_NORM,
    PER_LAYER_PROJECTION,
    POST_PROJECTION,
    PRE_PROJECTION,
    final_norm_bias_name,
    merge_names,
)
from trt_kvcache.model.weight_parts import WeightPart, exact_tensors, layer_parts

ArrayT = TypeVar("ArrayT")

#: Values that a thread rounds at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Projection(Generic[ArrayT]):
    """A linear map: ``weight [out, in]``, and ``bias [out]`` or None."""

    weight: ArrayT
    bias: ArrayT | None


@dataclass(frozen=True)
class NormWeights(Generic[ArrayT]):
    """A norm: ``weight``, and ``bias`` of the same shape or None."""

    weight: ArrayT
    bias: ArrayT | None


@dataclass(frozen=True)
class DecoderLayerWeights(Generic[ArrayT]):
    """Weights of one decoder layer by role, as :func:`~trt_kvcache.model.weight_parts.layer_parts` names them; None for absent norms.

    Norms of the hidden state are ``[hidden]``; of q and k ``[head_dim]``, or as wide as q and k.
    """

    parts: Mapping[str, ArrayT]

    def __getitem__(self, role: str) -> ArrayT:
        """Return a weight that the layer has."""
        return self.parts[role]

    def get(self, role: str) -> ArrayT | None:
        """Return a weight, or None if the layer does not have it."""
        return self.parts.get(role)

    def projection(self, name: str) -> Projection[ArrayT]:
        """Return a linear map that the layer has."""
        return Projection(self.parts[f"{name}.weight"], self.parts.get(f"{name}.bias"))

    def norm(self, name: str) -> NormWeights[ArrayT] | None:
        """Return a norm, or None if the layer does not have it."""
        weight = self.get(f"{name}.weight")
        return None if weight is None else NormWeights(weight, self.get(f"{name}.bias"))

    @cached_property
    def input_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of the mixer's input."""
        return self.norm("input_norm")

    @cached_property
    def q(self) -> Projection[ArrayT]:
        """Projection to q."""
        return self.projection("q")

    @cached_property
    def k(self) -> Projection[ArrayT]:
        """Projection to k."""
        return self.projection("k")

    @cached_property
    def v(self) -> Projection[ArrayT]:
        """Projection to v."""
        return self.projection("v")

    @cached_property
    def o(self) -> Projection[ArrayT]:
        """Projection of the attention output."""
        return self.projection("o")

    @cached_property
    def q_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of q."""
        return self.norm("q_norm")

    @cached_property
    def k_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of k."""
        return self.norm("k_norm")

    @cached_property
    def mixer_output_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of the mixer's output (post-norm)."""
        return self.norm("mixer_output_norm")

    @cached_property
    def mlp_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of the MLP's input."""
        return self.norm("mlp_norm")

    @cached_property
    def gate(self) -> Projection[ArrayT]:
        """Gate projection of the MLP."""
        return self.projection("gate")

    @cached_property
    def up(self) -> Projection[ArrayT]:
        """Up projection of the MLP."""
        return self.projection("up")

    @cached_property
    def down(self) -> Projection[ArrayT]:
        """Down projection of the MLP."""
        return self.projection("down")

    @cached_property
    def mlp_output_norm(self) -> NormWeights[ArrayT] | None:
        """Norm of the MLP's output (post-norm)."""
        return self.norm("mlp_output_norm")


@dataclass(frozen=True)
class MergeWeights(Generic[ArrayT]):
    """Norms of the embedding and of the hidden state that a draft head reads, and a linear map.

    The map of an MTP head is of the concatenated norms; that of an EAGLE-3 head, of the concatenated states, is for the model's engine.
    """

    embedding_norm: ArrayT
    hidden_norm: ArrayT
    projection: ArrayT


@dataclass(frozen=True, kw_only=True)
class AssistantWeights(Generic[ArrayT]):
    """Linear maps into and out of an assistant, and the centroids ``[clusters, hidden]`` of its token ids or None."""

    pre_projection: ArrayT
    post_projection: ArrayT
    centroids: ArrayT | None


@dataclass(frozen=True, kw_only=True)
class PerLayerWeights(Generic[ArrayT]):
    """The per-layer embedding ``[vocab, layers * size]``, the projection to it, and the norm of that."""

    embedding: ArrayT
    projection: Projection[ArrayT]
    norm: NormWeights[ArrayT]


@dataclass(frozen=True, kw_only=True)
class DecoderWeights(Generic[ArrayT]):
    """A whole decoder. ``embedding`` and ``head`` are ``[vocab, hidden]``, one array where they are tied.

    An assistant in an engine has the embedding of its model, which is wider than its head.
    """

    embedding: ArrayT
    layers: tuple[DecoderLayerWeights[ArrayT], ...]
    final_norm: NormWeights[ArrayT]
    head: ArrayT
    merge: MergeWeights[ArrayT] | None = None
    assistant: AssistantWeights[ArrayT] | None = None
    per_layer: PerLayerWeights[ArrayT] | None = None


def decoder_weights(config: ModelConfig, tensor: Callable[[str], ArrayT]) -> DecoderWeights[ArrayT]:
    """Collect the weights of a model. ``tensor(name)`` is called once for each tensor, by its name in transformers.

    Weights of a fused tensor are views of its rows, or copies where the rows are not contiguous.
    """
    family = FAMILIES[config.family]
    embedding = tensor(family.embedding)
    layers = tuple(layer_weights(config, index, tensor) for index in range(config.num_layers))
    bias = final_norm_bias_name(config)
    final_norm = NormWeights(tensor(family.final_norm), None if bias is None else tensor(bias))
    head = embedding if config.tie_word_embeddings else tensor(HEAD)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=final_norm,
        head=head,
        merge=merge_weights(config, tensor),
        assistant=assistant_weights(config, tensor),
        per_layer=per_layer_weights(config, tensor),
    )


def merge_weights(config: ModelConfig, tensor: Callable[[str], ArrayT]) -> MergeWeights[ArrayT] | None:
    """Collect the weights of the input of a draft head; None for a model that reads tokens alone."""
    names = merge_names(config)
    return None if names is None else MergeWeights(*map(tensor, names))


def assistant_weights(config: ModelConfig, tensor: Callable[[str], ArrayT]) -> AssistantWeights[ArrayT] | None:
    """Collect the weights around the layers of an assistant; None for another model."""
    own = config.assistant_input
    if own is None:
        return None
    centroids = None if own.clusters is None else tensor(CENTROIDS)
    return AssistantWeights(pre_projection=tensor(PRE_PROJECTION), post_projection=tensor(POST_PROJECTION), centroids=centroids)


def per_layer_weights(config: ModelConfig, tensor: Callable[[str], ArrayT]) -> PerLayerWeights[ArrayT] | None:
    """Collect the weights of per-layer embeddings; None for a model without."""
    if config.per_layer_embedding is None:
        return None
    embedding, projection = tensor(PER_LAYER_EMBEDDING), Projection(tensor(PER_LAYER_PROJECTION), None)
    return PerLayerWeights(embedding=embedding, projection=projection, norm=NormWeights(tensor(PER_LAYER_NORM), None))


def layer_weights(
    config: ModelConfig, index: int, tensor: Callable[[str], ArrayT], *, without: Collection[str] = ()
) -> DecoderLayerWeights[ArrayT]:
    """Collect the weights of one layer, except for the roles ``without``: see :func:`decoder_weights`."""
    parts = {role: part for role, part in layer_parts(config, index).items() if role not in without}
    tensors = {name: tensor(name) for name in dict.fromkeys(part.tensor for part in parts.values())}

    def weight(part: WeightPart) -> ArrayT:
        whole = tensors[part.tensor]
        return whole if part.is_whole else whole[part.index]  # type: ignore[index]  # arrays can be indexed

    return DecoderLayerWeights({role: weight(part) for role, part in parts.items()})


class RoundedTensors:
    """Reads the tensors of a checkpoint, rounded to ``dtype`` except for those in ``exact``.

    ``progress(done_bytes, total_bytes)`` is called with each tensor.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str, progress: Callable[[int, int], object] | None = None) -> None:
        self._checkpoint = checkpoint
        self.dtype = numpy_dtype(dtype)
        self.exact = exact_tensors(checkpoint.config)
        self._progress = progress
        self._done, self._total = 0, checkpoint.nbytes
        self._counted: set[str] = set()

    def __call__(self, name: str) -> npt.NDArray[Any]:
        """Return one tensor, read-only: in the dtype, or in a narrower stored one that it holds exactly. Not copied unless rounded."""
        stored = self._checkpoint.tensor(name)
        values = self._rounded(name, stored)
        self.count(name)
        return values

    def count(self, name: str) -> None:
        """Report the progress of a tensor that has been read, here or otherwise, once."""
        if name in self._counted:
            return
        self._counted.add(name)
        self._done += self._checkpoint.nbytes_of(name)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _rounded(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if name in self.exact or np.can_cast(stored.dtype, self.dtype):
            return stored
        rounded = np.empty(stored.shape, self.dtype)

        def round_rows(rows: slice) -> None:
            with np.errstate(over="ignore"):
                rounded[rows] = stored[rows]
            if not np.isfinite(rounded[rows]).all():
                raise CheckpointError(f"{self._checkpoint.path}: {name} has values that {self.dtype} cannot hold. Choose another dtype.")

        for_each(round_rows, row_slices(len(stored), stored[:1].size, _CHUNK))
        return rounded
