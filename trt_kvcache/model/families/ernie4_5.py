"""ERNIE 4.5, dense: Llama with interleaved RoPE, and biases in all projections or in none."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    if fields.get("compression_ratio") not in (None, 1):
        raise fields.refusal("compression_ratio", "1 (positions of RoPE as they are)")
    bias = fields.flag("use_bias", False)
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias)
    return model(fields, "ernie4_5", [pre_norm_layer(fields, mixer, mlp(fields, bias=bias))] * num_layers(fields))


_CONFIG, _MODELS = "configuration_ernie4_5.Ernie4_5_Config", "modeling_ernie4_5.Ernie4_5_"

FAMILY = Family(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    title="ERNIE 4.5 (dense)",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    interleaved_rope=True,
    older_architectures=frozenset({"Ernie4_5_ForCausalLM"}),
    code=frozenset({_CONFIG, f"{_MODELS}Model", f"{_MODELS}ForCausalLM"}),
)
