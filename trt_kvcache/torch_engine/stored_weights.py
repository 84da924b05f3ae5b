"""``StoredWeights``: the weights of one layer, whose matrices may be packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trt_kvcache.checkpoint.decoder_weights import DecoderLayerWeights, layer_weights
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.weight_parts import layer_parts
from trt_kvcache.torch_engine.operations import TorchProjection
from trt_kvcache.torch_engine.packed_weight import PackedWeight

#: Function of a name in Hugging Face transformers: the tensor, on the engine's device and in its dtype.
LoadTensor = Callable[[str], torch.Tensor]

#: Function of a tensor name and selections of its rows: the packed rows, or None if the tensor is not packed, and :data:`LoadTensor` reads
#: it.
LoadPacked = Callable[[str, Sequence[slice | list[int]]], PackedWeight | None]


@dataclass(frozen=True)
class StoredWeights(DecoderLayerWeights[torch.Tensor]):
    """Weights of one layer by role: matrices of ``packed`` are in no other mapping."""

    packed: Mapping[str, PackedWeight]

    def matrix(self, name: str) -> TorchProjection:
        """Return a linear map that the layer has."""
        weight, bias = f"{name}.weight", self.parts.get(f"{name}.bias")
        return TorchProjection(self.packed[weight] if weight in self.packed else self.parts[weight], bias)


def stored_weights(config: ModelConfig, index: int, load: LoadTensor, load_packed: LoadPacked) -> StoredWeights:
    """Return the weights of a layer."""
    packed = {}
    for role, part in layer_parts(config, index).items():
        found = load_packed(part.tensor, part.selections) if len(part.shape) == 2 else None
        if found is not None:
            packed[role] = found
    return StoredWeights(layer_weights(config, index, load, without=packed).parts, packed)
