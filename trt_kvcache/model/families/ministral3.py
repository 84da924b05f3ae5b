"""Ministral 3: Mistral with YaRN, and queries that are scaled by their position."""

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.layer_config import QueryScaling
from trt_kvcache.model.model_config import ModelConfig

_BETA = "llama_4_scaling_beta"


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    layer = pre_norm_layer(
        fields,
        attention(
            fields,
            rope=rope(fields, other_fields=(_BETA, "max_position_embeddings")),
            window=window_of_all(fields),
            query_scaling=_query_scaling(fields),
        ),
        mlp(fields),
    )
    return model(fields, "ministral3", [layer] * num_layers(fields))


def _query_scaling(fields: ConfigFields) -> QueryScaling:
    """Return the scaling, whose numbers stand among those of RoPE."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(scaling, dict):
        raise ConfigError("rope_parameters: expected an object, got none.")
    numbers = ConfigFields(scaling, "rope_parameters.")
    return QueryScaling(beta=numbers.number(_BETA), period=numbers.integer("original_max_position_embeddings"))


FAMILY = Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    title="Ministral 3",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
)
