"""Gemma 3, text decoder: Gemma 2 with norms of q and k, five sliding-window layers for each full one, and a RoPE for each type."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import gemma2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import FULL, SLIDING, attention, layer_types, num_layers, rope_of_layer_type
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.model_config import ModelConfig

_THETAS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    pattern = fields.integer("sliding_window_pattern")
    kinds = layer_types(fields, [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers(fields))])
    options = {"qk_norm": QkNormConfig(norm=gemma2.gemma_norm(fields)), **gemma2.attention_options(fields)}
    mixers = {
        kind: attention(fields, rope=rope_of_layer_type(fields, kind, theta=_THETAS[kind]), window=gemma2.window(fields, kind), **options)
        for kind in set(kinds)
    }
    return gemma2.gemma(fields, "gemma3_text", [mixers[kind] for kind in kinds])


FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    title="Gemma 3",
    defaults={
        **gemma2.FAMILY.defaults,
        "vocab_size": 262208,  # published files with a tower leave out these two sizes
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    read=read,
    names=gemma2.GEMMA_NAMES,
    uses=frozenset({"final_logit_softcapping"}),
)
