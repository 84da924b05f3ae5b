"""Folders of PEFT with random LoRA weights, and what they do to a weight in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trt_kvcache.checkpoint.safetensors_file import SafetensorsFile
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes
from trt_kvcache.model.weight_parts import exact_tensors, expert_tensors

Array = np.ndarray[Any, Any]

Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"

#: Fields of an ``adapter_config.json``, as PEFT writes them.
FIELDS: dict[str, Any] = {
    "base_model_name_or_path": "somebody/base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 7,
    "lora_dropout": 0.1,
    "loftq_config": {},
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 3,
    "rank_pattern": {},
    "task_type": "CAUSAL_LM",
    "use_dora": False,
}

#: Of ``tests.helpers.models.SMALL``: outputs and inputs.
SHAPES: Mapping[str, tuple[int, int]] = {Q_PROJ: (96, 40), DOWN_PROJ: (40, 28)}


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]] = SHAPES, *, rank: int = 3, seed: int = 0, dtype: Any = np.float32, **fields: Any
) -> Path:
    """Write an adapter of linear modules, with ``fields`` in its configuration; those that are ``...`` are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {**FIELDS, "r": rank, "target_modules": sorted(shapes), **fields}
    (folder / "adapter_config.json").write_text(json.dumps({name: value for name, value in given.items() if value is not ...}))
    random = np.random.default_rng(seed)
    tensors = {}
    for module, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = random.standard_normal((rank, inputs)).astype(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = random.standard_normal((outputs, rank)).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def tensors_of(folder: Path, file: str = "adapter_model.safetensors") -> dict[str, Array]:
    """Return the tensors of a safetensors file, in memory of their own."""
    opened = SafetensorsFile(folder / file)
    return {name: opened.array(name).copy() for name in opened.tensors}


def edit_adapter(folder: Path, tensors: Mapping[str, Array]) -> None:
    """Replace the tensors of an adapter."""
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def merged(folder: Path, base: Array, module: str, scale: float) -> Array:
    """Return a weight with the adapter of a linear module, in float64."""
    tensors = tensors_of(folder)
    a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    result: Array = base.astype(np.float64) + scale * (b @ a)
    return result


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers of a decoder that an adapter may change next to their products, by module."""
    others = {*expert_tensors(model), *exact_tensors(model)}
    matrices = ((name, shape) for name, shape in tensor_shapes(model).items() if len(shape) == 2 and ".layers." in name)
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in matrices if name not in others}


def write_two_adapters(folder: Path, model: ModelConfig) -> dict[str, Path]:
    """Write an adapter of all linear layers, and one of every other of them, of another rank and scale."""
    shapes = linear_shapes(model)
    some = dict(list(shapes.items())[::2])
    return {
        "sql": write_adapter(folder / "sql", shapes, rank=3, seed=1, lora_alpha=0.5),
        "poems": write_adapter(folder / "poems", some, rank=5, seed=2, lora_alpha=0.3, use_rslora=True),
    }
