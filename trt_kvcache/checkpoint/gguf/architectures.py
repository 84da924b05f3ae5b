"""Architectures of GGUF (``general.architecture``): family in transformers, configuration, names of tensors and order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_kvcache.checkpoint.gguf import gemma4_config, model_config
from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.errors import CheckpointError

#: Function of the metadata and the length of a dimension: the index in the file of each element of transformers.
Order = Callable[[Metadata, int], npt.NDArray[np.int64]]

#: Names of tensors outside the layers, without their endings.
MODEL_NAMES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

#: Names of tensors after ``blk.<index>.``, and their names after ``model.layers.<index>.``.
LAYER_NAMES: Mapping[str, str] = {
    **_ATTENTION,
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: Place of the number of an expert in names: a file has one tensor for all experts of a layer.
EXPERT = "{expert}"

#: Place of the name of a projection in names of tensors that hold the rows of :data:`GATE_UP` of each expert, one after another.
PROJECTION, GATE_UP = "{projection}", ("gate", "up")

_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{EXPERT}.{part}_proj" for part in ("gate", "up", "down")}

_GEMMA_NAMES = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _mamba_names(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


def _halves(count: str) -> Order:
    """Return the order of projections whose rows RoPE rotates in pairs: neighbours in a file, two halves in transformers."""

    def order(metadata: Metadata, rows: int) -> npt.NDArray[np.int64]:
        heads = metadata.largest(metadata.own(count))
        if heads < 1 or rows % (2 * heads):
            return np.arange(rows)  # the shape is refused
        pairs: npt.NDArray[np.int64] = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return pairs

    return order


_PAIRED: Mapping[str, Order] = {"attn_q": _halves("attention.head_count"), "attn_k": _halves("attention.head_count_kv")}


def _values_of_heads(metadata: Metadata, length: int, *, follow_keys: bool = False) -> npt.NDArray[np.int64]:
    """Return the order of a gated delta net's tensors with one part for each value head; ``follow_keys``: q and k come first.

    A file has the first value head of each key head, then the second ones; transformers groups them by key head.
    """
    own, integer = metadata.own, metadata.integer
    keys, values = integer(own("ssm.group_count")), integer(own("ssm.time_step_rank"))
    before = 2 * keys * integer(own("ssm.state_size")) if follow_keys else 0
    if not 0 < keys <= values or values % keys or length <= before or (length - before) % values:
        return np.arange(length)  # the shape is refused
    after = np.arange(before, length).reshape(values // keys, keys, -1).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(before), after])


def _values_after_keys(metadata: Metadata, length: int) -> npt.NDArray[np.int64]:
    return _values_of_heads(metadata, length, follow_keys=True)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF."""

    family: str  # model_type of transformers
    config: Callable[[Metadata], dict[str, Any]]  # fields of config.json, without model_type
    names: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    # Several names that map to one are the rows of one tensor in transformers, in this order.
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    layers: str = "model.layers"  # prefix of a layer's index in transformers
    norms_plus_one: frozenset[str] = frozenset()  # norms stored as 1 + weight
    rows: Mapping[str, Order] = field(default_factory=dict)  # order of a tensor's rows, by GGUF name
    columns: Mapping[str, Order] = field(default_factory=dict)
    # Other families of the same architecture name, each with the test that tells it apart.
    variants: tuple[tuple[Callable[[Metadata], bool], Architecture], ...] = ()


def _has_window(metadata: Metadata) -> bool:
    return model_config.window(metadata) is not None


def _is_bamba(metadata: Metadata) -> bool:
    """Return True for a hybrid that has RoPE and no multipliers of Granite."""
    own = metadata.own
    return metadata.flag(own("rope.scaling.finetuned"), False) and own("embedding_scale") not in metadata


_LLAMA = Architecture(family="llama", config=model_config.dense, rows=_PAIRED)
_GEMMA_NORMS = frozenset({"output_norm", "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"})
_GEMMA2 = Architecture(family="gemma2", config=model_config.gemma2, layer_names=_GEMMA_NAMES, norms_plus_one=_GEMMA_NORMS)
_BAMBA = Architecture(
    family="bamba",
    config=model_config.bamba,
    names={**MODEL_NAMES, "output_norm": "model.final_layernorm"},
    layer_names={
        **_ATTENTION,
        **_mamba_names("mamba"),
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    rows=_PAIRED,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": replace(_LLAMA, variants=((_has_window, replace(_LLAMA, family="mistral", config=model_config.mistral)),)),
    "mistral3": replace(_LLAMA, family="ministral3", config=model_config.ministral3),
    "qwen2": Architecture(family="qwen2", config=model_config.dense),
    "qwen3": Architecture(family="qwen3", config=model_config.dense),
    "qwen3moe": Architecture(
        family="qwen3_moe", config=model_config.qwen3_moe, layer_names={**LAYER_NAMES, **_EXPERTS, "ffn_gate_inp": "mlp.gate"}
    ),
    "gpt-oss": Architecture(
        family="gpt_oss",
        config=model_config.gpt_oss,
        layer_names={
            **_ATTENTION,
            **_EXPERTS,
            "attn_sinks.weight": "self_attn.sinks",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "phi3": Architecture(
        family="phi3",
        config=model_config.phi3,
        layer_names={**LAYER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gemma2": _GEMMA2,
    "gemma3": replace(_GEMMA2, family="gemma3_text", config=model_config.gemma3),
    "gemma4": Architecture(
        family="gemma4_text",
        config=gemma4_config.gemma4,
        names={
            **MODEL_NAMES,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        layer_names={
            **_GEMMA_NAMES,
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": f"experts.{EXPERT}.{PROJECTION}_proj",
            **{f"ffn_{part}_exps": f"experts.{EXPERT}.{part}_proj" for part in (*GATE_UP, "down")},
            "ffn_down_exps.scale": "router.per_expert_scale",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
    ),
    "smollm3": replace(_LLAMA, family="smollm3", config=model_config.smollm3),
    "olmo2": Architecture(
        family="olmo2",
        config=model_config.olmo2,
        layer_names={**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "granite": replace(_LLAMA, family="granite", config=model_config.granite),
    "qwen35": Architecture(
        family="qwen3_5_text",
        config=model_config.qwen3_5,
        layer_names={
            **LAYER_NAMES,
            **_mamba_names("linear_attn"),
            "post_attention_norm": "post_attention_layernorm",
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
        },
        norms_plus_one=_GEMMA_NORMS,
        rows={
            **dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), _values_of_heads),
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), _values_after_keys),
        },
        columns={"ssm_out": _values_of_heads},
    ),
    "lfm2": Architecture(
        family="lfm2",
        config=model_config.lfm2,
        names={
            **dict.fromkeys(("output_norm", "token_embd_norm"), "model.embedding_norm"),
            **{"token_embd": "model.embed_tokens"},
            "output": "lm_head",
        },
        layer_names={
            **_ATTENTION,
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
    ),
    "mamba2": Architecture(
        family="mamba2",
        config=model_config.mamba2,
        names={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layer_names={**_mamba_names("mixer"), "attn_norm": "norm"},
        layers="backbone.layers",
    ),
    "granitehybrid": Architecture(
        family="granitemoehybrid",
        config=model_config.granite_hybrid,
        layer_names={
            **LAYER_NAMES,
            **_mamba_names("mamba"),
            **dict.fromkeys(("ffn_gate", "ffn_up"), "shared_mlp.input_linear"),
            "ffn_down": "shared_mlp.output_linear",
        },
        rows=_PAIRED,
        variants=((_is_bamba, _BAMBA),),
    ),
    "nemotron_h": Architecture(
        family="nemotron_h",
        config=model_config.nemotron_h,
        names={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
        layer_names={
            **_mamba_names("mixer"),
            "attn_norm": "norm",
            **{f"attn_{part}": f"mixer.{name}_proj" for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))},
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        },
        rows=_PAIRED,
    ),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a model. Raises CheckpointError for an unknown one, an adapter or a vision tower."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise metadata.refusal("general.type", "model: adapters and vision towers are not read")
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise metadata.refusal("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    return next((variant for applies, variant in found.variants if applies(metadata)), found)


def check_is_read(metadata: Metadata) -> None:
    """Raise CheckpointError if a file has tensors or fields of features that no engine here computes."""
    key = metadata.own("attention.causal")
    if not metadata.flag(key, True):
        raise CheckpointError(f"{metadata.header.path}: {key}: expected true, got false: it is an encoder.")
