"""Ministral 3: Mistral with YaRN, and queries scaled by position."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.layer_config import QueryScaling
from trt_kvcache.model.model_config import ModelConfig

_BETA = "llama_4_scaling_beta"

#: Default ``rope_parameters``.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    if not any(fields.get(name) for name in ("rope_parameters", "rope_scaling")):
        fields = ConfigFields({**fields.data, "rope_parameters": _ROPE})
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


def _query_scaling(fields: ConfigFields) -> QueryScaling | None:
    """Return the query scaling, whose fields are in ``rope_parameters``; None with a factor that is 1 everywhere."""
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
    assert isinstance(scaling, dict)  # RoPE has been read from it
    numbers = ConfigFields(scaling, "rope_parameters.")
    if (beta := numbers.get(_BETA)) == 0 and not isinstance(beta, bool):
        return None
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
