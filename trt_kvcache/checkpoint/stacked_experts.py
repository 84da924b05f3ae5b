"""A tensor with all experts of a layer, read as one tensor for each expert."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.family import ExpertStack
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import stacked_experts

#: Names and shapes of the weights of each expert, by :func:`stacked_experts`.
_Experts = Sequence[Mapping[str, tuple[int, ...]]]


def split_experts(config: ModelConfig, files: Mapping[str, WeightFile], folder: Path) -> dict[str, WeightFile]:
    """Return the files by tensor, with tensors of single experts in place of the tensors ``[experts, ...]`` that hold them.

    Raises CheckpointError for a tensor of another shape, and for experts that are stored twice.
    """
    family, found = FAMILIES[config.family], dict(files)
    pattern = re.compile(rf"{re.escape(family.layers)}\.(\d{{1,9}})\.(.+)")
    splits: dict[SafetensorsFile, dict[str, dict[str, StoredTensor]]] = {}
    for name, file in files.items():
        layer = pattern.fullmatch(name)
        if layer is None or layer[2] not in family.stacked or int(layer[1]) >= config.num_layers or not isinstance(file, SafetensorsFile):
            continue
        experts, stack, stored = stacked_experts(config, int(layer[1]), layer[2]), family.stacked[layer[2]], file.tensors[name]
        if not experts:
            continue
        expected = _stack_shape(stack, experts, stored)
        if stored.shape != expected:
            raise CheckpointError(f"{file.path}: expected {name} of shape {expected} by config.json, got {stored.shape}.")
        parts = _parts(stack, experts, stored)
        twice = [part for part in parts if part in found]
        if twice:
            raise CheckpointError(f"{folder}: expected each expert of a {config.family} model once, got {name} and {twice[0]}.")
        splits.setdefault(file, {})[name] = parts
        del found[name]
        found |= dict.fromkeys(parts, file)
    for file, tensors in splits.items():
        file.split(tensors)
    return found


def _stack_shape(stack: ExpertStack, experts: _Experts, stored: StoredTensor) -> tuple[int, ...]:
    """Return the expected shape of a stack. Of a part of packed weights, the sizes after the rows are left to its format."""
    rows, (_, *inputs) = sum(shape[0] for shape in experts[0].values()), next(iter(experts[0].values()))
    if stack.part:
        return (len(experts), rows, *stored.shape[2:])
    return (len(experts), *inputs, rows) if stack.is_transposed else (len(experts), rows, *inputs)


def _parts(stack: ExpertStack, experts: _Experts, stored: StoredTensor) -> dict[str, StoredTensor]:
    """Return the tensors of single experts in a stack, by name."""
    itemsize = stored.nbytes // max(math.prod(stored.shape), 1)  # a part may be empty until its format refuses it
    strides = [itemsize * math.prod(stored.shape[axis + 1 :]) for axis in range(len(stored.shape))]
    rows = len(stored.shape) - 1 if stack.is_transposed else 1
    others = [axis for axis in range(1, len(stored.shape)) if axis != rows]
    found = {}
    for expert, weights in enumerate(experts):
        first = 0
        for place, (name, (count, *_)) in enumerate(weights.items()):
            step = len(weights) if stack.is_interleaved else 1
            start = place if stack.is_interleaved else first
            shape = (count, *(stored.shape[axis] for axis in others))
            found[name] = StoredTensor(
                dtype=stored.dtype,
                shape=shape,
                offset=stored.offset + expert * strides[0] + start * strides[rows],
                nbytes=itemsize * math.prod(shape),
                strides=(step * strides[rows], *(strides[axis] for axis in others)),
            )
            first += count
    return found
