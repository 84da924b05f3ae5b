"""Phi-3, Phi-3.5 and Phi-4-mini: Mistral with fused q, k and v, fused gate and up, LongRoPE and partial RoPE."""

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    found = rope(
        fields,
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
        may_be_partial=True,
        other_kinds={"su": "longrope", "yarn": "longrope"},
    )
    if found.kind not in ("default", "longrope"):
        raise ConfigError(f"rope_scaling: expected default or longrope for model_type 'phi3', got {found.kind}.")
    layer = pre_norm_layer(fields, attention(fields, rope=found, window=window_of_all(fields)), mlp(fields))
    return model(fields, "phi3", [layer] * num_layers(fields))


FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    title="Phi-3, Phi-4-mini",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 32000,
    },
    read=read,
    names={
        **LLAMA_NAMES,
        **dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
        **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    },
    code=frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"}),
)
