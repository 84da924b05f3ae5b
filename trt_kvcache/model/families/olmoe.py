"""OLMoE: experts in all layers, and norms over all heads of q and of k."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, num_experts, router
from trt_kvcache.model.families.family import EXPERT_NAMES, LLAMA_NAMES, STACKED_EXPERTS, Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, norm, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    if "clip_qkv" in fields:
        raise fields.refusal("clip_qkv", "null")
    if fields.integer("head_dim", 1) * fields.integer("num_attention_heads") != fields.integer("hidden_size") and "head_dim" in fields:
        raise fields.refusal("head_dim", "hidden_size / num_attention_heads, or null")
    bias = fields.flag("attention_bias", False)
    mixer = attention(fields, rope=rope(fields), qkv_bias=bias, o_bias=bias, qk_norm=QkNormConfig(norm=norm(fields), over="full"))
    choice = router(fields, num_experts(fields, 64), renormalise=fields.flag("norm_topk_prob", False))
    layer = pre_norm_layer(fields, mixer, RoutedMlpConfig(router=choice, expert=mlp(fields)))
    return model(fields, "olmoe", [layer] * num_layers(fields))


FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    title="OLMoE",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "eos_token_id": 50279,
    },
    read=read,
    names={**LLAMA_NAMES, **EXPERT_NAMES},
    stacked=STACKED_EXPERTS,
    uses=frozenset(NUM_EXPERTS),
)
