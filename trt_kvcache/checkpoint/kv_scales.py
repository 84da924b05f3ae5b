"""Static scales of K and V in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trt_kvcache.checkpoint.weight_file import WeightFile
from trt_kvcache.errors import CheckpointError
from trt_kvcache.model.layer_config import AttentionConfig
from trt_kvcache.model.model_config import ModelConfig

#: Scale of K and scale of V of a layer: a number, or one for each K/V head.
LayerScales = tuple[float | tuple[float, ...], float | tuple[float, ...]]

#: Tensor names of compressed-tensors and of ModelOpt.
_NAMES = ("model.layers.{layer}.self_attn.{side}_scale", "model.layers.{layer}.self_attn.{side}_proj.{side}_scale")


def read_kv_scales(model: ModelConfig, files: Mapping[str, WeightFile], folder: Path) -> tuple[LayerScales, ...]:
    """Return the static scales of each layer that stores K and V; empty if no layer has one. Raises CheckpointError if only some have."""
    names = [[_name(files, layer, side) for side in "kv"] for layer in model.kv_indices]
    if all(name is None for pair in names for name in pair):
        return ()
    found = []
    for layer, mixer, pair in zip(model.kv_indices, model.kv_layers, names, strict=True):
        missing = next((side for side, name in zip("kv", pair, strict=True) if name is None), None)
        if missing is not None:
            raise CheckpointError(f"{folder}: expected static scales of K and V in all layers, got no {missing}_scale in layer {layer}.")
        k, v = (_scale(files[name], name, mixer) for name in pair if name is not None)
        found.append((k, v))
    return tuple(found)


def _name(files: Mapping[str, WeightFile], layer: int, side: str) -> str | None:
    return next((name for form in _NAMES if (name := form.format(layer=layer, side=side)) in files), None)


def _scale(file: WeightFile, name: str, mixer: AttentionConfig) -> float | tuple[float, ...]:
    values = file.array(name).astype(np.float32).reshape(-1)
    if len(values) not in (1, mixer.num_kv_heads) or not (np.isfinite(values) & (values > 0)).all():
        expected = f"a finite number above 0, or one for each of {mixer.num_kv_heads} heads"
        raise CheckpointError(f"{file.path}: {name}: expected {expected}, got {values[:4].tolist()} of {len(values)}.")
    return values.item() if len(values) == 1 else tuple(values.tolist())
