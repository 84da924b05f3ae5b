"""Gemma 4 12B, text decoder: as Gemma 4 without per-layer embeddings and experts."""

from dataclasses import replace

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import gemma4_text
from trt_kvcache.model.families.refusals import EXPERTS, unsupported
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    if fields.get("hidden_size_per_layer_input"):
        raise fields.refusal("hidden_size_per_layer_input", "0 or nothing, as this family has no per-layer embeddings")
    if fields.flag("enable_moe_block", False):
        raise unsupported(fields, {"enable_moe_block": EXPERTS})
    return gemma4_text.read(fields)


_ABSENT = {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}

FAMILY = replace(
    gemma4_text.FAMILY,
    name="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    title="Gemma 4 unified",
    defaults={
        **{name: value for name, value in gemma4_text.FAMILY.defaults.items() if name not in _ABSENT},
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    read=read,
    uses=gemma4_text.FAMILY.uses - {"num_experts"},
)
