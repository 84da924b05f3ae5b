"""Nemotron-H: each layer is only Mamba-2, attention without RoPE, an MLP with squared ReLU and no gate, or experts that are such MLPs."""

from dataclasses import replace
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_LAYERS
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.expert_fields import num_experts, router
from trt_kvcache.model.families.family import (
    DRAFT_HEADS,
    MERGE_PROJECTION,
    MERGED_EMBEDDING_NORM,
    MERGED_HIDDEN_NORM,
    ExpertStack,
    Family,
)
from trt_kvcache.model.families.fields import attention, mlp, model, norm, silu_convolution
from trt_kvcache.model.families.mamba2 import MIXER_NAMES
from trt_kvcache.model.layer_config import LayerConfig
from trt_kvcache.model.mlp_config import RoutedMlpConfig
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.recurrent_config import Mamba2Config

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"

#: Layer types by pattern letters, and by names in older files.
_KINDS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS, "mamba": _MAMBA, "attention": _ATTENTION}

#: Most layers of an MTP head: the last one has its final norm.
_MAX_MTP_LAYERS = 8

#: Addend of the sum that scores of experts are divided by, in transformers.
_SUM_EPSILON = 1e-20

#: Names of fields in older files; these take precedence.
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


def read(fields: ConfigFields) -> ModelConfig:
    """Return the model of a ``config.json``."""
    older = {name: fields.get(old) for old, name in _OLDER_NAMES.items() if old in fields}
    fields = ConfigFields({**fields.data, **older}, defaults=FAMILY.defaults)
    if "sliding_window" in fields:
        raise fields.refusal("sliding_window", "null")
    norms = norm(fields, field="layer_norm_epsilon")
    if "rms_norm_eps" in fields and fields.number("rms_norm_eps") != norms.epsilon:
        raise fields.refusal("rms_norm_eps", f"layer_norm_epsilon={norms.epsilon}")
    kinds, layers = _kinds(fields), {}
    if _MAMBA in kinds:
        layers[_MAMBA] = LayerConfig(mixer=_mamba(fields), mlp=None, input_norm=norms)
    if _ATTENTION in kinds:
        layers[_ATTENTION] = LayerConfig(mixer=attention(fields, rope=None), mlp=None, input_norm=norms)
    if _MLP in kinds:
        feed_forward = mlp(fields, activation_field="mlp_hidden_act", bias=fields.flag("mlp_bias", False), gated=False)
        layers[_MLP] = LayerConfig(mixer=None, mlp=feed_forward, mlp_norm=norms)
    if _EXPERTS in kinds:
        layers[_EXPERTS] = LayerConfig(mixer=None, mlp=_experts(fields), mlp_norm=norms)
    return model(fields, "nemotron_h", [layers[kind] for kind in kinds], final_norm=norms)


def read_mtp(fields: ConfigFields) -> ModelConfig:
    """Return the MTP head: layers of attention and of experts, in turn."""
    # As in vLLM (vllm/model_executor/models/nemotron_h_mtp.py): `eh_proj` of the norm of the embedding, first, and of the norm of the
    # hidden state after the final norm of the model. The first layer has these, the last one has the final norm of the head.
    if fields.count("num_nextn_predict_layers", 1) != 1:
        raise fields.refusal("num_nextn_predict_layers", "1, an MTP head for one token")
    name = "mtp_hybrid_override_pattern" if "mtp_hybrid_override_pattern" in fields else "mtp_layers_block_type"
    given = fields.get(name) if name in fields else [_ATTENTION, _EXPERTS]
    kinds = (
        [_KINDS.get(kind, kind) for kind in given]
        if isinstance(given, (str, list)) and all(isinstance(kind, str) for kind in given)
        else []
    )
    if not set(kinds) <= {_ATTENTION, _EXPERTS} or _ATTENTION not in kinds or len(kinds) > _MAX_MTP_LAYERS:
        raise fields.refusal(name, f"at most {_MAX_MTP_LAYERS} layers of attention and of experts")
    head = read(ConfigFields({**fields.data, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}))
    return replace(head, merge_norm=head.final_norm)


def _kinds(fields: ConfigFields) -> list[str]:
    """Return the type of each layer, from a list of names or else from a pattern of letters."""
    name = next((name for name in ("layers_block_type", "layer_types") if name in fields), "hybrid_override_pattern")
    given = fields.get(name)
    if not given or not isinstance(given, str if name == "hybrid_override_pattern" else list) or len(given) > MAX_LAYERS:
        raise ConfigError(
            f"{name}: expected from 1 to {MAX_LAYERS} kinds of layers, as a list layers_block_type or as a text hybrid_override_pattern, "
            f"got {short_repr(given)}."
        )
    if fields.integer("num_hidden_layers", len(given)) != len(given):
        raise fields.refusal("num_hidden_layers", f"{len(given)} as {name} says")
    kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in given]
    for index, kind in enumerate(kinds):
        if kind not in (_MAMBA, _ATTENTION, _MLP, _EXPERTS):
            raise ConfigError(f"{name}: {short_repr(given[index])} is not supported, got it in layer {index}.")
    return kinds


def _experts(fields: ConfigFields) -> RoutedMlpConfig:
    """Return the experts of all layers that have some."""
    if fields.integer("n_shared_experts") != 1:
        raise fields.refusal("n_shared_experts", "1")
    names = ("n_routed_experts", "num_local_experts")
    renormalise, bias = fields.flag("norm_topk_prob", True), fields.flag("mlp_bias", False)
    choice = router(
        fields,
        num_experts(fields, 8, names=names),
        scores="sigmoid",
        renormalise=renormalise,
        sum_epsilon=_SUM_EPSILON if renormalise else 0.0,
        factor=fields.number("routed_scaling_factor"),
        choice_bias=True,
        num_groups=fields.integer("n_group"),
        groups_per_token=fields.integer("topk_group"),
    )
    latent = fields.integer("moe_latent_size") if "moe_latent_size" in fields else None
    parts: dict[str, Any] = {"activation_field": "mlp_hidden_act", "gated": False}
    return RoutedMlpConfig(
        router=choice,
        expert=mlp(fields, size_field="moe_intermediate_size", **parts),
        shared=mlp(fields, size_field="moe_shared_expert_intermediate_size", bias=bias, **parts),
        latent_size=latent,
        latent_bias=bias and latent is not None,
    )


def _mamba(fields: ConfigFields) -> Mamba2Config:
    """Return the Mamba-2 of all layers. As in transformers, ``time_step_min`` is the only limit of its time steps."""
    silu_convolution(fields, "mamba_hidden_act")
    return Mamba2Config(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=fields.integer("n_groups"),
        kernel=fields.integer("conv_kernel"),
        norm=norm(fields, field="layer_norm_epsilon"),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        dt_min=fields.number("time_step_min"),
    )


FAMILY = Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    title="Nemotron-H",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read=read,
    read_mtp=read_mtp,
    mtp_names={
        f"{DRAFT_HEADS}layers.0.enorm.": MERGED_EMBEDDING_NORM.removesuffix("weight"),
        f"{DRAFT_HEADS}layers.0.hnorm.": MERGED_HIDDEN_NORM.removesuffix("weight"),
        f"{DRAFT_HEADS}layers.0.eh_proj.": MERGE_PROJECTION.removesuffix("weight"),
        **{f"{DRAFT_HEADS}layers.{index}.final_layernorm.": "model.norm_f." for index in range(_MAX_MTP_LAYERS)},
    },
    embedding="model.embeddings.weight",
    final_norm="model.norm_f.weight",
    names={
        "input_norm": "norm",
        "mlp_norm": "norm",
        **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
        **MIXER_NAMES,
        "router": "mixer.gate",
        "choice_bias": "mixer.gate.e_score_correction_bias",
        "latent_in": "mixer.fc1_latent_proj",
        "latent_out": "mixer.fc2_latent_proj",
        **{f"expert_{name}": f"mixer.experts.{{expert}}.{name}_proj" for name in ("up", "down")},
        **{f"shared_{name}": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    },
    stacked={f"mixer.experts.{name}_proj": ExpertStack(roles=(f"expert_{name}",)) for name in ("up", "down")},
    renamed={"backbone.": "model."},
    ignored=(DRAFT_HEADS,),
    uses=frozenset({"n_routed_experts", "num_local_experts"}),
    code=frozenset({"configuration_nemotron_h.NemotronHConfig", "modeling_nemotron_h.NemotronHForCausalLM"}),
)
