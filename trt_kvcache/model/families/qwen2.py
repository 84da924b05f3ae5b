"""Qwen2: Llama with biases of q, k and v, and optional sliding-window attention from layer ``max_window_layers`` on."""

from typing import Any

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, pre_norm_layer, rope, windows_from_layer
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    return read_with(fields, "qwen2")


def read_with(fields: ConfigFields, family: str, **rope_options: Any) -> ModelConfig:
    """Return the model of a family like Qwen2, with options of :func:`rope`."""
    parts = {"rope": rope(fields, **rope_options), "qkv_bias": True}
    layers = [pre_norm_layer(fields, attention(fields, window=window, **parts), mlp(fields)) for window in windows_from_layer(fields)]
    return model(fields, family, layers)


FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    title="Qwen2",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    read=read,
)
