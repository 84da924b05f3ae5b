"""Mistral: Llama without biases, with sliding-window attention if ``sliding_window`` is not null."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    layer = pre_norm_layer(fields, attention(fields, rope=rope(fields), window=window_of_all(fields)), mlp(fields))
    return model(fields, "mistral", [layer] * num_layers(fields))


FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    title="Mistral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
)
