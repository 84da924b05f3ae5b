"""Golden models with a vision tower, and folders of their text decoders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tests.golden.weights import VISION, VISION_SEEDS, random_weights
from trt_kvcache.model import ModelConfig

#: Fields of the text decoder that are stated next to its ``text_config``, are defaults, or differ in a model of its own.
NEXT_TO_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"torch_dtype": "float16", "eos_token_id": [3, 7], "tie_word_embeddings": True},
    "gemma3-bias": {"tie_word_embeddings": False},
    "mistral3": {"torch_dtype": "float16", "tie_word_embeddings": False},
    "mistral3-ministral": {"eos_token_id": 9},
    "qwen3_5": {},
    "qwen3_5-bias": {"dtype": "bfloat16", "tie_word_embeddings": False},
    "qwen3_vl": {"model_type": "qwen3", "rope_scaling": None},
    "qwen3_vl-bias": {"model_type": "qwen3", "dtype": "float16", "rope_theta": 90.0, "rope_parameters": None},
    "qwen2_5_vl": {"model_type": "qwen2", "rope_scaling": None, "vision_config": None, "architectures": None},
    "qwen2_5_vl-window": {
        "model_type": "qwen2",
        "rope_theta": 90.0,
        "rope_parameters": None,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
    },
}


def vision_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model with a tower."""
    config: dict[str, Any] = json.loads((VISION / name / "config.json").read_text(encoding="utf-8"))
    return config


def text_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of its text decoder as a model of its own."""
    config = vision_config(name)
    return {**config.get("text_config", config), **NEXT_TO_TEXT[name]}


def write_text_decoder(folder: Path, name: str) -> Path:
    """Write the text decoder of a model with a tower as a model of its own."""
    config = text_config(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(ModelConfig.from_dict(config), VISION_SEEDS[name]), folder / "model.safetensors")
    return folder
