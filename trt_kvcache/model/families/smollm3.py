"""SmolLM3: Llama without RoPE in some layers, by default in every fourth."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, windows
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    bias = fields.flag("attention_bias", False)
    has_rope = _layers_with_rope(fields)
    shared, found = mlp(fields, bias=fields.flag("mlp_bias", False)), rope(fields)
    layers = []
    for window, rotated in zip(windows(fields, [not rotated for rotated in has_rope]), has_rope, strict=True):
        options = {"rope": found if rotated else None, "window": window}
        layers.append(pre_norm_layer(fields, attention(fields, qkv_bias=bias, o_bias=bias, **options), shared))
    return model(fields, "smollm3", layers)


def _layers_with_rope(fields: ConfigFields) -> list[bool]:
    """Return a flag for each layer: True with RoPE, a 1 in ``no_rope_layers`` despite its name."""
    count, given = num_layers(fields), fields.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(given, list) or len(given) != count or any(value not in (0, 1) for value in given):
        raise fields.refusal("no_rope_layers", f"{count} numbers, 1 for a layer with RoPE and 0 for one without")
    return [bool(value) for value in given]


FAMILY = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    title="SmolLM3",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    read=read,
)
