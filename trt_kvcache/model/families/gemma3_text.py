"""Gemma 3, text decoder: Gemma 2 with norms of q and k, five sliding-window layers for each full one, and a RoPE for each type."""

from collections.abc import Mapping
from typing import Any

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import gemma2
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.fields import FULL, SLIDING, attention, layer_types, num_layers
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.rope import RopeConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    pattern = fields.integer("sliding_window_pattern")
    kinds = layer_types(fields, [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers(fields))])
    options = {"qk_norm": QkNormConfig(norm=gemma2.gemma_norm(fields)), **gemma2.attention_options(fields)}
    mixers = {kind: attention(fields, rope=_rope(fields, kind), window=gemma2.window(fields, kind), **options) for kind in set(kinds)}
    return gemma2.gemma(fields, "gemma3_text", [mixers[kind] for kind in kinds])


def _rope(fields: ConfigFields, kind: str) -> RopeConfig:
    """Return the RoPE of a layer type. Older files have fields for both; their scaling belongs to full attention."""
    theta = fields.number("rope_theta" if kind == FULL else "rope_local_base_freq")
    given = fields.get("rope_parameters")
    if given and not (isinstance(given, Mapping) and set(given) <= {FULL, SLIDING}):
        raise ConfigError(f"rope_parameters: expected one object for {FULL} and one for {SLIDING}, got others.")
    config: dict[str, Any] = {"rope_theta": theta, "rope_scaling": fields.get("rope_scaling") if kind == FULL else None}
    if given:
        config["rope_parameters"] = given.get(kind)
    return RopeConfig.from_dict(config, max_position_embeddings=fields.integer("max_position_embeddings"))


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
