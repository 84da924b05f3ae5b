"""Writes small Hugging Face folders with random weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.model import ModelConfig
from trt_kvcache.model.tensor_shapes import tensor_shapes

#: One layer, all sizes different.
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 40,
    "intermediate_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}


def with_mixer(model: ModelConfig, **changes: Any) -> ModelConfig:
    """Return a model whose layers all have these changes of their attention."""
    return replace(model, layers=tuple(replace(layer, mixer=replace(layer.mixer, **changes)) for layer in model.layers))


def with_layers(model: ModelConfig, count: int) -> ModelConfig:
    """Return a model with so many times the first layer."""
    return replace(model, layers=model.layers[:1] * count)


def write_model(folder: Path, *, seed: int = 0, scale: float = 0.2, **changes: Any) -> Path:
    """Write a model of :data:`SMALL` with ``changes``; return its folder."""
    config = {**SMALL, **changes}
    model = ModelConfig.from_dict(config)
    random = np.random.default_rng(seed)
    weights = {
        name: (random.standard_normal(shape) * scale).astype(numpy_dtype(model.dtype)) for name, shape in tensor_shapes(model).items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
