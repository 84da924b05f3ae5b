"""Qwen3-MoE: Qwen3 with experts in all layers, or in some of them."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, mlps, num_experts, router, sparse_layers
from trt_kvcache.model.families.family import EXPERT_NAMES, LLAMA_NAMES, STACKED_EXPERTS, Family
from trt_kvcache.model.families.fields import attention, mlp, model, norm, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    bias, has_window = fields.flag("attention_bias", False), fields.flag("use_sliding_window", False)
    window = window_of_all(fields if has_window else ConfigFields({**fields.data, "sliding_window": None}))
    parts = {"rope": rope(fields), "qkv_bias": bias, "o_bias": bias, "qk_norm": QkNormConfig(norm=norm(fields))}
    mixer, experts = attention(fields, window=window, **parts), num_experts(fields, 128)

    def routed() -> RoutedMlpConfig:
        choice = router(fields, experts, renormalise=fields.flag("norm_topk_prob", False))
        return RoutedMlpConfig(router=choice, expert=mlp(fields, size_field="moe_intermediate_size"))

    of_layers = mlps(sparse_layers(fields, experts), routed, lambda: mlp(fields))
    return model(fields, "qwen3_moe", [pre_norm_layer(fields, mixer, one) for one in of_layers])


FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "intermediate_size": 6144,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    read=read,
    names={**LLAMA_NAMES, **EXPERT_NAMES},
    stacked=STACKED_EXPERTS,
    uses=frozenset(NUM_EXPERTS),
)
