"""Experts of a layer that are stored as one tensor, as one matrix for each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.families.registry import FAMILIES
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.weight_parts import stacked_experts


def split_experts(config: ModelConfig, files: Mapping[str, WeightFile], folder: Path) -> dict[str, WeightFile]:
    """Return the files by tensor, with matrices of single experts in place of the tensors ``[experts, rows, columns]`` that hold them.

    Raises CheckpointError for a tensor of another shape, and for experts that are stored twice.
    """
    family, found = FAMILIES[config.family], dict(files)
    pattern = re.compile(rf"{re.escape(family.layers)}\.(\d{{1,9}})\.(.+)")
    splits: dict[SafetensorsFile, dict[str, dict[str, tuple[int, ...]]]] = {}
    for name, file in files.items():
        layer = pattern.fullmatch(name)
        if layer is None or layer[2] not in family.stacked or int(layer[1]) >= config.num_layers or not isinstance(file, SafetensorsFile):
            continue
        experts = stacked_experts(config, int(layer[1]), layer[2])
        if not experts:
            continue
        expected = (len(experts), sum(shape[0] for shape in experts[0].values()), *next(iter(experts[0].values()))[1:])
        if file.tensors[name].shape != expected:
            raise CheckpointError(f"{file.path}: expected {name} of shape {expected} by config.json, got {file.tensors[name].shape}.")
        parts = {part: shape for expert in experts for part, shape in expert.items()}
        twice = [part for part in parts if part in found]
        if twice:
            raise CheckpointError(f"{folder}: expected each expert of a {config.family} model once, got {name} and {twice[0]}.")
        splits.setdefault(file, {})[name] = parts
        del found[name]
        found |= dict.fromkeys(parts, file)
    for file, tensors in splits.items():
        file.split(tensors)
    return found
