"""Small models: folders of random weights, golden models and their features, states of published head sizes, text decoders of towers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.golden.weights import VISION, VISION_SEEDS, random_weights
from tests.paths import GOLDEN
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.engine.attention_variants import why_not_native
from trt_kvcache.model import ModelConfig, RoutedMlpConfig
from trt_kvcache.model.features import features
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


@cache
def model_of(name: str) -> ModelConfig:
    """Return the configuration of a golden model."""
    return ModelConfig.from_dict(json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")))


def changed_model(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a golden model with ``changes`` of its fields."""
    return ModelConfig.from_dict({**json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")), **changes})


def features_of(name: str) -> tuple[str, ...]:
    """Return the features that a golden model needs."""
    return tuple(features(model_of(name)))


def has_experts(name: str) -> bool:
    """Return True for a golden model with experts."""
    return any(isinstance(layer.mlp, RoutedMlpConfig) for layer in model_of(name).layers)


def attentions_of(name: str, max_sequence_length: int) -> tuple[str, ...]:
    """Return the variants of TensorRT's own attention that a golden model can be built with, the default one first."""
    if has_experts(name):  # plugin layers
        return ()
    return ("mask",) if why_not_native(model_of(name), max_sequence_length) else ("native", "mask")


def skip_what_is_not_computed(request: pytest.FixtureRequest, computed: Collection[str]) -> None:
    """Skip a test whose parameter ``model`` is a golden model that needs a feature which is not among those computed."""
    model = request.node.callspec.params.get("model") if hasattr(request.node, "callspec") else None
    missing = sorted(set(features_of(model)) - set(computed)) if isinstance(model, str) and (GOLDEN / model).is_dir() else []
    if missing:
        pytest.skip(f"{model} needs what the engine does not compute yet: {', '.join(missing)}")


_MAMBA = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 4, "mamba_expand": 2}

#: Larger sizes of golden models with states.
_SIZES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "bamba": _MAMBA,
    "granitemoehybrid": {**_MAMBA, "num_attention_heads": 2, "num_key_value_heads": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 256, "head_dim": 64},
    "nemotron_h": {"head_dim": 64, "attention_head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 128},
    "mamba2": {"head_dim": 64, "num_heads": 4, "state_size": 128},
    "qwen3_next": {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}

#: Golden models with states, as :func:`hybrid_model` makes them.
HYBRIDS = tuple(_SIZES)

#: How far logits of two engines may be apart, relative to the largest one. Seen: 9e-6, 0.018 and 0.16, with the delta rule, which passes
#: on what 16 bits round; the others are a third of that.
HYBRID_TOLERANCES = {"float32": 1e-4, "float16": 4e-2, "bfloat16": 3e-1}


def sinks_model() -> ModelConfig:
    """Return a golden model with attention sinks with heads for which there are kernels. All experts are chosen: rounding changes none."""
    fields = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text(encoding="utf-8"))
    sizes = {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 3}
    return ModelConfig.from_dict({**fields, "attention_bias": True, **sizes})


def hybrid_model(name: str) -> ModelConfig:
    """Return a golden model of published head sizes, for which there are kernels: hidden size 128, attention heads of 64."""
    fields = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return ModelConfig.from_dict({**fields, "hidden_size": 128, **_SIZES[name]})


# --- models with a vision tower, and folders of their text decoders alone ---

#: Fields of the text decoder that are stated next to its ``text_config``, are defaults, or differ in a model of its own.
NEXT_TO_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"torch_dtype": "float16", "eos_token_id": [3, 7], "tie_word_embeddings": True},
    "gemma3-bias": {"tie_word_embeddings": False},
    "mistral3": {"torch_dtype": "float16", "tie_word_embeddings": False},
    "mistral3-ministral": {"eos_token_id": 9},
    "qwen3_5": {},
    "qwen3_5-bias": {"dtype": "bfloat16", "tie_word_embeddings": False},
    "qwen3_5_moe": {},
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
    "gemma4": {"eos_token_id": [1, 6]},
    "gemma4_unified": {"dtype": "float16"},
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
