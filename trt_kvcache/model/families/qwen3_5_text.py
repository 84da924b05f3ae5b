"""Qwen3.5, text decoder: Qwen3-Next without experts, with other names of the gated delta net's projections."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen3_next
from trt_kvcache.model.families.family import DRAFT_HEADS, Family
from trt_kvcache.model.families.fields import IMAGE_AXES
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    if not fields.flag("attn_output_gate", True):
        raise fields.refusal("attn_output_gate", "true")
    if fields.get("output_gate_type") not in (None, "silu", "swish"):
        raise fields.refusal("output_gate_type", "silu")
    return qwen3_next.read_hybrid(fields, "qwen3_5_text", rope_fields=IMAGE_AXES)


FAMILY = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    title="Qwen3.5 (text)",
    defaults={
        **{name: value for name, value in qwen3_next.FAMILY.defaults.items() if name not in ("decoder_sparse_step", "num_experts")},
        "num_key_value_heads": 4,
    },
    read=read,
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
