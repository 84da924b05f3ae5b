"""``StoredWeights``: the weights of one layer, whose matrices may be packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trt_kvcache.checkpoint.decoder_weights import DecoderLayerWeights, layer_weights
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.weight_parts import EXACT_ROLES, WeightPart, layer_parts, split_role
from trt_kvcache.torch_engine.adapter_updates import AdapterUpdate, LoadUpdates
from trt_kvcache.torch_engine.operations import TorchProjection
from trt_kvcache.torch_engine.packed_matrix import PackedMatrix
from trt_kvcache.torch_engine.packed_stack import MatrixStack, PackedStack, stack_of

#: Function of a name in Hugging Face transformers: the tensor, on the engine's device and in its dtype.
LoadTensor = Callable[[str], torch.Tensor]

#: Function of a tensor name and selections of its rows: the packed rows, or None if the tensor is not packed, and :data:`LoadTensor` reads
#: it.
LoadPacked = Callable[[str, Sequence[slice | list[int]]], PackedMatrix | None]


@dataclass(frozen=True)
class StoredWeights(DecoderLayerWeights[torch.Tensor]):
    """Weights of one layer by role. Matrices of ``packed`` are in no other mapping, nor are those of ``experts``, which are yet to read."""

    packed: Mapping[str, PackedMatrix]
    experts: Mapping[str, WeightPart]
    load: LoadTensor
    load_packed: LoadPacked
    updates: Mapping[str, AdapterUpdate]

    def matrix(self, name: str) -> TorchProjection:
        """Return a linear map that the layer has."""
        weight, bias = f"{name}.weight", self.parts.get(f"{name}.bias")
        return TorchProjection(self.packed[weight] if weight in self.packed else self.parts[weight], bias, self.updates.get(weight))

    def stacks(self, *stacks: Sequence[str]) -> list[MatrixStack]:
        """Return maps ``[E, out, in]`` of all experts, each with the concatenated outputs of some names: all packed, or none."""
        found: list[MatrixStack] = []
        for names in stacks:
            packed = self._packed_stack(names)
            if packed is None:
                return [arranged(weight) for weight in map(self.stacked, stacks) if weight is not None]
            found.append(packed)
        return found

    def _packed_stack(self, names: Sequence[str]) -> PackedStack | None:
        parts = []
        for part in self._parts_of(names, ".weight"):
            packed = self.load_packed(part.tensor, part.selections)
            if packed is None:
                return None
            parts.append(packed)
        return stack_of(parts, len(parts) // len(names))

    def _parts_of(self, names: Sequence[str], suffix: str) -> list[WeightPart]:
        """Return the weights of all experts with these names, expert by expert."""
        return [part for role, part in self.experts.items() if split_role(role)[0] in names and split_role(role)[2] == suffix]

    def stacked(self, names: Sequence[str], suffix: str = ".weight") -> torch.Tensor | None:
        """Return a weight of all experts, read one by one into one tensor; None if they do not have it."""
        parts = self._parts_of(names, suffix)
        if not parts:
            return None
        experts, rows = len(parts) // len(names), sum(part.shape[0] for part in parts[: len(names)])
        whole: torch.Tensor | None = None
        first = 0
        for part in parts:
            values = self.load(part.tensor)[part.index]
            if whole is None:
                whole = values.new_empty((experts * rows, *values.shape[1:]))
            whole[first : first + len(values)] = values
            first += len(values)
        assert whole is not None
        return whole.unflatten(0, (experts, rows))


def stored_weights(
    config: ModelConfig, index: int, load: LoadTensor, load_packed: LoadPacked, load_updates: LoadUpdates = lambda index: {}
) -> StoredWeights:
    """Return the weights of a layer."""
    parts = layer_parts(config, index)
    experts = {role: part for role, part in parts.items() if split_role(role)[1]}
    packed = {}
    for role, part in parts.items():
        found = (
            load_packed(part.tensor, part.selections) if len(part.shape) == 2 and role not in experts and role not in EXACT_ROLES else None
        )
        if found is not None:
            packed[role] = found
    others = layer_weights(config, index, load, without=packed.keys() | experts.keys())
    return StoredWeights(others.parts, packed, experts, load, load_packed, load_updates(index))


def arranged(weight: torch.Tensor) -> torch.Tensor:
    """Return matrices ``[..., out, in]`` in the memory order in which the device multiplies them fastest with a single row.

    For float32 on a CPU that is column by column: ``benchmarks/torch_engine.py`` measures both.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.mT.contiguous().mT
    return weight
