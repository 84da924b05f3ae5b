"""Qwen3.5-MoE, text decoder: Qwen3.5 with experts and a gated shared one in all layers."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import qwen3_5_text, qwen3_next
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, num_experts
from trt_kvcache.model.families.family import STACKED_EXPERTS, Family
from trt_kvcache.model.families.fields import num_layers
from trt_kvcache.model.model_config import ModelConfig

#: Fields of relatives that this family computes with one value only, which transformers does not look up.
_FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    for name, value in _FIXED.items():
        if name in fields and fields.get(name) != value:
            raise fields.refusal(name, f"{value} or null")
    experts = qwen3_next.experts(fields, num_experts(fields, 256), True)
    return qwen3_5_text.read_hybrid(fields, "qwen3_5_moe_text", [experts] * num_layers(fields))


def read_mtp(fields: ConfigFields) -> ModelConfig:
    """Return the MTP head: a model of one attention layer, with experts."""
    return qwen3_5_text.mtp_head(fields, read)


FAMILY = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen3.5-MoE (text)",
    defaults={
        **qwen3_5_text.FAMILY.defaults,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
    },
    read=read,
    read_mtp=read_mtp,
    names=qwen3_5_text.FAMILY.names,
    stacked=STACKED_EXPERTS,
    head_by_head=qwen3_5_text.FAMILY.head_by_head,
    renamed=qwen3_5_text.FAMILY.renamed,
    ignored=qwen3_5_text.FAMILY.ignored,
    uses=frozenset(NUM_EXPERTS),
)
