"""EXAONE 4: post-norms, norms of q and k; in models with sliding windows, full-attention layers have no RoPE."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import olmo2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import (
    FULL,
    SLIDING,
    attention,
    layer_types,
    mlp,
    model,
    norm,
    num_layers,
    rope,
    window_of_layer_type,
)
from trt_kvcache.model.layer_config import LayerConfig, QkNormConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    kinds = layer_types(fields, _layers_of_pattern(fields))
    norms, shared, found = norm(fields), mlp(fields), rope(fields)
    is_hybrid = "sliding_window" in fields
    layers = {}
    for kind in set(kinds):
        rotated = None if is_hybrid and kind == FULL else found
        mixer = attention(fields, rope=rotated, window=window_of_layer_type(fields, kind), qk_norm=QkNormConfig(norm=norms))
        layers[kind] = LayerConfig(mixer=mixer, mlp=shared, mixer_output_norm=norms, mlp_output_norm=norms)
    return model(fields, "exaone4", [layers[kind] for kind in kinds])


def _layers_of_pattern(fields: ConfigFields) -> list[str]:
    """Return the layer types of files without ``layer_types``."""
    count = num_layers(fields)
    if fields.get("layer_types") or "sliding_window" not in fields:
        return [FULL] * count
    pattern = fields.integer("sliding_window_pattern")
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]


FAMILY = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    title="EXAONE 4",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    read=read,
    names=olmo2.FAMILY.names,
)
