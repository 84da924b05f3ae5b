"""LFM2-MoE: LFM2 with experts after the first layers. Scores are sigmoids; a bias of each expert is added for the choice only."""

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import lfm2
from trt_kvcache.model.families.expert_fields import NUM_EXPERTS, mlps, num_experts, router
from trt_kvcache.model.families.family import ExpertStack, Family
from trt_kvcache.model.families.fields import num_layers
from trt_kvcache.model.mlp_config import MlpConfig, RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig

_EXPERTS = "feed_forward.experts"

#: Addend of the sum that scores are divided by, in transformers.
_SUM_EPSILON = 1e-6


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    if "layer_types" not in fields:
        raise fields.refusal("layer_types", "a list of names")
    dense = fields.count("num_dense_layers", FAMILY.defaults["num_dense_layers"])
    if dense < 0:
        raise fields.refusal("num_dense_layers", "a number of layers >= 0")

    def routed() -> RoutedMlpConfig:
        renormalise = fields.flag("norm_topk_prob", True)
        choice = router(
            fields,
            num_experts(fields, 32),
            scores="sigmoid",
            renormalise=renormalise,
            sum_epsilon=_SUM_EPSILON if renormalise else 0.0,
            factor=fields.number("routed_scaling_factor"),
            choice_bias=fields.flag("use_expert_bias", True),
        )
        return RoutedMlpConfig(router=choice, expert=MlpConfig(intermediate_size=fields.integer("moe_intermediate_size")))

    has_experts = [index >= dense for index in range(num_layers(fields))]
    of_layers = mlps(has_experts, routed, lambda: MlpConfig(intermediate_size=fields.integer("intermediate_size")))
    return lfm2.read_hybrid(fields, "lfm2_moe", of_layers)


FAMILY = Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    title="LFM2-MoE",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "conv_L_cache": 3,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    final_norm=lfm2.FAMILY.final_norm,
    names={
        **lfm2.FAMILY.names,
        "router": "feed_forward.gate",
        "choice_bias": "feed_forward.expert_bias",
        "expert_gate": f"{_EXPERTS}.{{expert}}.w1",
        "expert_up": f"{_EXPERTS}.{{expert}}.w3",
        "expert_down": f"{_EXPERTS}.{{expert}}.w2",
    },
    stacked={
        f"{_EXPERTS}.gate_up_proj": ExpertStack(roles=("expert_gate", "expert_up")),
        f"{_EXPERTS}.down_proj": ExpertStack(roles=("expert_down",)),
    },
    uses=frozenset(NUM_EXPERTS),
)
