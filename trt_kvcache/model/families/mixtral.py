"""Mixtral: Mistral with experts in all layers."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, num_experts, router
from trt_kvcache.model.families.family import LLAMA_NAMES, ExpertStack, Family
from trt_kvcache.model.families.fields import attention, mlp, model, num_layers, pre_norm_layer, rope, window_of_all
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig

_MLP = "block_sparse_moe"


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    experts = RoutedMlpConfig(router=router(fields, num_experts(fields, 8), renormalise=True), expert=mlp(fields))
    layer = pre_norm_layer(fields, attention(fields, rope=rope(fields), window=window_of_all(fields)), experts)
    return model(fields, "mixtral", [layer] * num_layers(fields))


FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    title="Mixtral",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "intermediate_size": 14336,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    names={
        **LLAMA_NAMES,
        "router": f"{_MLP}.gate",
        "expert_gate": f"{_MLP}.experts.{{expert}}.w1",
        "expert_up": f"{_MLP}.experts.{{expert}}.w3",
        "expert_down": f"{_MLP}.experts.{{expert}}.w2",
    },
    stacked={
        f"{_MLP}.experts.gate_up_proj": ExpertStack(roles=("expert_gate", "expert_up")),
        f"{_MLP}.experts.down_proj": ExpertStack(roles=("expert_down",)),
    },
    renamed_in_layers={"mlp.": f"{_MLP}."},
    uses=frozenset(NUM_EXPERTS),
)
