"""HunYuan, dense: norms of q and k after RoPE, whose base is raised by a fixed factor (NTK-aware scaling)."""

import math
from collections.abc import Mapping
from dataclasses import replace

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import LLAMA_NAMES, Family
from trt_kvcache.model.families.fields import attention, full_attention_only, mlp, model, norm, num_layers, pre_norm_layer, rope
from trt_kvcache.model.layer_config import QkNormConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.rope import RopeConfig

#: Values of fields of older code, of which transformers computes no others.
_FIXED = {
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "use_cla": False,
    "mlp_bias": False,
    "add_classification_head": False,
    "norm_type": "rms",
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    full_attention_only(fields)
    for name, value in _FIXED.items():
        if fields.get(name) not in (None, value):
            raise fields.refusal(name, str(value).lower())
    bias = fields.flag("attention_bias", False)
    qk_norm = QkNormConfig(norm=norm(fields), after_rope=True)
    mixer = attention(fields, rope=None, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    if fields.get("attention_head_dim") not in (None, mixer.head_dim):
        raise fields.refusal("attention_head_dim", f"head_dim={mixer.head_dim}")
    layer = pre_norm_layer(fields, replace(mixer, rope=_rope(fields, mixer.head_dim)), mlp(fields))
    return model(fields, "hunyuan_v1_dense", [layer] * num_layers(fields))


def _rope(fields: ConfigFields, head_dim: int) -> RopeConfig:
    """Return the RoPE: ``dynamic`` with a factor ``alpha`` does not depend on the length of a sequence."""
    found = rope(fields, other_fields=("alpha",))
    spelling = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.get(spelling)
    if not isinstance(given, Mapping) or given.get("alpha") is None:
        return found
    scaling = ConfigFields(given, f"{spelling}.")
    if found.kind != "dynamic" or found.factor != 1:
        raise scaling.refusal("alpha", "none, unless the type is dynamic and the factor 1")
    found.check_head_dim(head_dim)
    exponent = head_dim / (head_dim - 2)
    if exponent * math.log(scaling.number("alpha")) > _MAX_LOG:
        raise scaling.refusal("alpha", "a smaller number")
    return RopeConfig(kind="default", theta=found.theta * scaling.number("alpha") ** exponent)


#: Logarithm of a number far above every base of RoPE, and far below the largest float.
_MAX_LOG = 300.0

FAMILY = Family(
    name="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    title="HunYuan (dense)",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    names={**LLAMA_NAMES, "q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
)
