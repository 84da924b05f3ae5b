"""Gemma 2: pre- and post-norms, soft caps, a scaled embedding, GELU, and sliding-window attention in every other layer."""

import math
from typing import Any

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import FULL, SLIDING, attention, layer_types, mlp, model, norm, num_layers, rope, softcap
from trt_kvcache.model.layer_config import AttentionConfig, LayerConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.norm_config import NormConfig

#: Names of the norms.
GEMMA_NAMES = {
    **LLAMA_NAMES,
    "mixer_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    kinds = layer_types(fields, [FULL if layer % 2 else SLIDING for layer in range(num_layers(fields))])
    capped = {"rope": rope(fields), "softcap": softcap(fields, "attn_logit_softcapping"), **attention_options(fields)}
    mixers = {kind: attention(fields, window=window(fields, kind), **capped) for kind in set(kinds)}
    return gemma(fields, "gemma2", [mixers[kind] for kind in kinds])


def window(fields: ConfigFields, kind: str) -> int | None:
    """Return the window of a type of layers."""
    return fields.integer("sliding_window") if kind == SLIDING else None


def attention_options(fields: ConfigFields) -> dict[str, bool | float]:
    """Return the attention options that all layers share."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "scale": fields.number("query_pre_attn_scalar") ** -0.5}


def gemma_norm(fields: ConfigFields) -> NormConfig:
    """Return RMSNorm with the weight 1 + ``weight``, in float32."""
    return norm(fields, weight_offset=1.0, rounds_before_weight=False)


def gemma(fields: ConfigFields, family: str, mixers: list[AttentionConfig]) -> ModelConfig:
    """Return a model with these mixers and the other parts of Gemma."""
    found, shared = gemma_norm(fields), mlp(fields, activation_field="hidden_activation")
    norms: dict[str, Any] = dict.fromkeys(("input_norm", "mixer_output_norm", "mlp_norm", "mlp_output_norm"), found)
    return model(
        fields,
        family,
        [LayerConfig(mixer=mixer, mlp=shared, **norms) for mixer in mixers],
        final_norm=found,
        embedding_multiplier=math.sqrt(fields.integer("hidden_size")),
        rounds_embedding_multiplier=True,
        final_softcap=softcap(fields, "final_logit_softcapping"),
    )


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    title="Gemma 2",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    read=read,
    names=GEMMA_NAMES,
    uses=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
)
