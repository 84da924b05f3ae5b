"""StableLM: Llama with LayerNorm and partial RoPE, and in some models biases of q, k and v, or attention and MLP in parallel."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import attention, full_attention_only, layer_norm, mlp, model, num_layers, pre_norm_layer, rope
from trt_kvcache.model.families.refusals import unsupported
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    if fields.flag("qk_layernorm", False):
        raise unsupported(fields, {"qk_layernorm": "has a LayerNorm for each head of q and k"})
    norms = layer_norm(fields, field="layer_norm_eps", bias=True)
    mixer = attention(fields, rope=rope(fields, may_be_partial=True), qkv_bias=fields.flag("use_qkv_bias", False))
    layer = pre_norm_layer(fields, mixer, mlp(fields), before=norms, parallel=fields.flag("use_parallel_residual", False))
    return model(fields, "stablelm", [layer] * num_layers(fields), final_norm=norms)


FAMILY = Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    title="StableLM",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    read=read,
)
