"""Command R7B and Command A: attention and MLP in parallel after one LayerNorm, interleaved RoPE in sliding-window layers only."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import (
    FULL,
    SLIDING,
    attention,
    layer_norm,
    layer_types,
    mlp,
    model,
    num_layers,
    pre_norm_layer,
    rope,
    window_of_layer_type,
)
from trt_kvcache.model.model_config import ModelConfig

#: Values of fields of older files, of which transformers computes no others.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    for name, value in _FIXED.items():
        if fields.get(name) not in (None, value):
            raise fields.refusal(name, str(value).lower())
    kinds = layer_types(fields, _layers_of_pattern(fields))
    bias, found, norms = fields.flag("attention_bias", False), rope(fields), layer_norm(fields, field="layer_norm_eps", bias=False)
    layers = {}
    for kind in set(kinds):
        rotated = found if kind == SLIDING else None
        mixer = attention(fields, rope=rotated, window=window_of_layer_type(fields, kind), qkv_bias=bias, o_bias=bias)
        layers[kind] = pre_norm_layer(fields, mixer, mlp(fields), before=norms, parallel=True)
        if mixer.num_heads * mixer.head_dim != fields.integer("hidden_size"):
            raise fields.refusal("head_dim", f"hidden_size / num_attention_heads={mixer.num_heads}")
    tied = fields.flag("tie_word_embeddings", True)
    if fields.get("use_embedding_sharing") not in (None, tied):
        raise fields.refusal("use_embedding_sharing", f"tie_word_embeddings={tied}")
    scaled = {"logits_divisor": 1 / fields.number("logit_scale"), "final_norm": norms}
    return model(fields, "cohere2", [layers[kind] for kind in kinds], tied=tied, **scaled)


def _layers_of_pattern(fields: ConfigFields) -> list[str]:
    """Return the layer types of files without ``layer_types``."""
    pattern = fields.integer("sliding_window_pattern")
    if not fields.get("layer_types") and fields.get("layer_switch") not in (None, pattern):
        raise fields.refusal("layer_switch", f"sliding_window_pattern={pattern}")
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers(fields))]


FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    title="Command R7B, Command A",
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    read=read,
    interleaved_rope=True,
)
