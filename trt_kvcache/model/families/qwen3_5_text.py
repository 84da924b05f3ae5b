"""Qwen3.5, text decoder: Qwen3-Next without experts, with other names of the gated delta net's projections."""

from collections.abc import Callable, Sequence

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen3_next
from trt_kvcache.model.families.expert_fields import Mlp
from trt_kvcache.model.families.family import DRAFT_HEADS, Family
from trt_kvcache.model.families.fields import IMAGE_AXES, mlp, num_layers
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    return read_hybrid(fields, "qwen3_5_text", [mlp(fields)] * num_layers(fields))


def read_hybrid(fields: ConfigFields, family: str, of_layers: Sequence[Mlp]) -> ModelConfig:
    """Return a model with this MLP in each layer."""
    if not fields.flag("attn_output_gate", True):
        raise fields.refusal("attn_output_gate", "true")
    if fields.get("output_gate_type") not in (None, "silu", "swish"):
        raise fields.refusal("output_gate_type", "silu")
    return qwen3_next.read_hybrid(fields, family, of_layers, rope_fields=IMAGE_AXES)


def read_mtp(fields: ConfigFields) -> ModelConfig:
    """Return the MTP head: a model of one attention layer."""
    return mtp_head(fields, read)


def mtp_head(fields: ConfigFields, read_model: Callable[[ConfigFields], ModelConfig]) -> ModelConfig:
    """Return the MTP head of a model with or without experts."""
    if fields.flag("mtp_use_dedicated_embeddings", False):
        raise fields.refusal("mtp_use_dedicated_embeddings", "false")
    return qwen3_next.mtp_head(fields, read_model, "mtp_num_hidden_layers")


FAMILY = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen3.5 (text)",
    defaults={
        **{name: value for name, value in qwen3_next.FAMILY.defaults.items() if name not in qwen3_next.EXPERT_DEFAULTS},
        "num_key_value_heads": 4,
    },
    read=read,
    read_mtp=read_mtp,
    names={
        **qwen3_next.FAMILY.names,
        "delta_qkv": "linear_attn.in_proj_qkv",
        "delta_z": "linear_attn.in_proj_z",
        "delta_b": "linear_attn.in_proj_b",
        "delta_a": "linear_attn.in_proj_a",
    },
    head_by_head=frozenset({"self_attn.q_proj"}),
    renamed={"model.language_model.": "model."},
    ignored=(DRAFT_HEADS, "model.visual."),
)
