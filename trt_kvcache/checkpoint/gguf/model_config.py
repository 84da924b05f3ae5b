"""Configurations in the fields of transformers' ``config.json``, from the metadata of GGUF files."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.tokenizer_files import end_token_ids, has_tokenizer, token_id
from trt_kvcache.errors import CheckpointError
from trt_kvcache.memory.shapes import MAX_LAYERS

Config = dict[str, Any]

#: Compute dtype of models whose weights are in blocks: with the range of float32, in which nearly all models were trained.
_DTYPE_OF_BLOCKS = "bfloat16"

#: Tensors with the factors by which RoPE divides frequencies.
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

_MAX_FACTORS = 1 << 12

#: Scores of a router, by their number in a file.
_SOFTMAX = 1


def dense(metadata: Metadata) -> Config:
    """Return the configuration of Llama, and of models that differ from it in their tensors alone."""
    return {**common(metadata), **_attention(metadata), **_mlp(metadata), **_rope(metadata)}


def qwen3_moe(metadata: Metadata) -> Config:
    """Return the configuration of Qwen3-MoE. As in llama.cpp, all layers have experts, whose weights are renormalised."""
    return {
        **common(metadata, has_experts=True),
        **_attention(metadata),
        **_mlp(metadata),
        **_rope(metadata),
        **router_fields(metadata, "num_experts"),
        "moe_intermediate_size": metadata.integer(metadata.own("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def gpt_oss(metadata: Metadata) -> Config:
    """Return the configuration of gpt-oss, whose clamped SwiGLU has the constants of the published models."""
    rope, layers, size = _rope(metadata), num_layers(metadata), window(metadata)
    scaling = rope["rope_scaling"] or {"rope_type": "default"}
    return {
        **common(metadata, has_experts=True),
        **_attention(metadata),
        **rope,
        **router_fields(metadata, "num_local_experts"),
        "rope_scaling": {**scaling, "truncate": False} if scaling["rope_type"] == "yarn" else scaling,
        "intermediate_size": metadata.integer(metadata.own("expert_feed_forward_length")),
        "sliding_window": size,
        "layer_types": layer_types(metadata, 2, layers, has_window=bool(size)),
    }


def router_fields(metadata: Metadata, count: str, per_token: str = "num_experts_per_tok") -> Config:
    """Return the fields of a router with softmax scores, without groups and factors, under these names."""
    own = metadata.own
    for field, allowed in (("expert_shared_count", 0), ("expert_group_count", 1), ("expert_gating_func", _SOFTMAX)):
        if metadata.integer(own(field), 0) not in (0, allowed):
            raise metadata.refusal(own(field), f"none, or {allowed}")
    if metadata.number(own("expert_weights_scale"), 0) not in (0, 1):
        raise metadata.refusal(own("expert_weights_scale"), "none, or 1")
    if not metadata.flag(own("expert_weights_norm"), True):
        raise metadata.refusal(own("expert_weights_norm"), "none, or true")
    return {count: metadata.integer(own("expert_count")), per_token: metadata.integer(own("expert_used_count"))}


def mistral(metadata: Metadata) -> Config:
    """Return the configuration of Mistral: Llama with a sliding window."""
    return {**dense(metadata), "sliding_window": window(metadata)}


def ministral3(metadata: Metadata) -> Config:
    """Return the configuration of Ministral 3: queries are scaled by their position."""
    found = dense(metadata)
    beta = metadata.number(metadata.own("attention.temperature_scale"))
    return {**found, "sliding_window": window(metadata), "rope_scaling": {**found["rope_scaling"], "llama_4_scaling_beta": beta}}


def phi3(metadata: Metadata) -> Config:
    """Return the configuration of Phi-3."""
    found = dense(metadata)
    original = metadata.integer(metadata.own("rope.scaling.original_context_length"), found["max_position_embeddings"])
    return {**found, "original_max_position_embeddings": original, "sliding_window": window(metadata)}


def gemma2(metadata: Metadata) -> Config:
    """Return the configuration of Gemma 2. The attention scale depends on the model's size, as in llama.cpp."""
    own, softcap = metadata.own, "attn_logit_softcapping"
    return {**_gemma(metadata, period=2, largest=46), softcap: metadata.number(own(softcap), 50.0) or None}


def gemma3(metadata: Metadata) -> Config:
    """Return the configuration of Gemma 3."""
    local = metadata.number(metadata.own("rope.freq_base_swa"), 10000.0)
    return {**_gemma(metadata, period=6, largest=62), "rope_local_base_freq": local}


def _gemma(metadata: Metadata, *, period: int, largest: int) -> Config:
    """Return the common part of Gemma 2 and 3: every ``period``-th layer has full attention; the largest model has another scale."""
    found = dense(metadata)
    final = metadata.own("final_logit_softcapping")
    layers, heads = found["num_hidden_layers"], found["num_attention_heads"]
    scalar = found["hidden_size"] // max(heads, 1) if layers == largest else found["head_dim"]
    size = window(metadata)
    return {
        **found,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": size or found["max_position_embeddings"],
        "layer_types": layer_types(metadata, period, layers, has_window=bool(size)),
        "final_logit_softcapping": metadata.number(final, 0.0) or None,
    }


def layer_types(metadata: Metadata, period: int, layers: int, *, has_window: bool) -> list[str]:
    """Return the type of each layer, from a flag for each or from a period."""
    key = metadata.own("attention.sliding_window_pattern")
    value = metadata.header.fields.get(key, period)
    if isinstance(value, np.ndarray):
        flags = [bool(flag) for flag in metadata.integers(key, layers)]
    else:
        every = metadata.integer(key, period)
        flags = [every != 0 and (layer + 1) % every != 0 for layer in range(layers)]
    return ["sliding_attention" if flag and has_window else "full_attention" for flag in flags]


def smollm3(metadata: Metadata) -> Config:
    """Return the configuration of SmolLM3: every fourth layer has no RoPE, which no field says."""
    return {**dense(metadata), "no_rope_layer_interval": 4}


def olmo2(metadata: Metadata) -> Config:
    """Return the configuration of OLMo 2. Files of OLMo 3, which has sliding windows, name the same architecture."""
    found, size = dense(metadata), window(metadata)
    if size is not None:
        raise CheckpointError(
            f"{metadata.header.path}: {metadata.own('attention.sliding_window')}: expected none, got {size}: it is OLMo 3."
        )
    return found


def granite(metadata: Metadata) -> Config:
    """Return the configuration of Granite: multipliers of the embedding, the attention scores, the residual stream and the logits."""
    return {**dense(metadata), **_multipliers(metadata)}


def granite_hybrid(metadata: Metadata) -> Config:
    """Return the configuration of Granite 4 with Mamba-2 layers."""
    found, kinds = dense(metadata), _kinds_of_hybrid(metadata)
    has_rope = metadata.flag(metadata.own("rope.scaling.finetuned"), False)
    return {
        **found,
        **_multipliers(metadata),
        **_mamba2(metadata, "mamba_"),
        "layer_types": ["attention" if attends else "mamba" for attends in kinds],
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": found["intermediate_size"],
        "num_local_experts": 0,
    }


def bamba(metadata: Metadata) -> Config:
    """Return the configuration of Bamba: partial RoPE of half a head."""
    found, kinds = dense(metadata), _kinds_of_hybrid(metadata)
    found.pop("partial_rotary_factor", None)
    return {
        **found,
        **_mamba2(metadata, "mamba_"),
        "attn_layer_indices": [index for index, attends in enumerate(kinds) if attends],
    }


def mamba2(metadata: Metadata) -> Config:
    """Return the configuration of Mamba-2, which has no position limit."""
    sizes = _mamba2(metadata, "")
    names = {
        "num_heads": "n_heads",
        "head_dim": "d_head",
        "state_size": "d_state",
        "n_groups": "n_groups",
        "conv_kernel": "d_conv",
        "expand": "expand",
        "use_conv_bias": "conv_bias",
        "use_bias": "proj_bias",
    }
    found = common(metadata)
    del found["max_position_embeddings"]
    return {**found, **{name: sizes[ours] for name, ours in names.items()}, "layer_norm_epsilon": epsilon(metadata), "hidden_act": "silu"}


def nemotron_h(metadata: Metadata) -> Config:
    """Return the configuration of Nemotron-H: per-layer head counts and MLP widths tell attention, MLP and Mamba-2 layers apart."""
    found, sizes = common(metadata), _mamba2(metadata, "")
    layers = found["num_hidden_layers"]
    key = metadata.own("feed_forward_length")
    widths, heads = metadata.integers(key, layers), metadata.integers(metadata.own("attention.head_count_kv"), layers)
    return {
        **found,
        **_attention(metadata),
        "intermediate_size": max(widths),
        "layers_block_type": ["mlp" if width else "attention" if kv else "mamba" for width, kv in zip(widths, heads, strict=True)],
        "mlp_hidden_act": "relu2",
        "mlp_bias": _has(metadata, "ffn_up.bias"),
        "mamba_num_heads": sizes["n_heads"],
        "mamba_head_dim": sizes["d_head"],
        "ssm_state_size": sizes["d_state"],
        "n_groups": sizes["n_groups"],
        "conv_kernel": sizes["d_conv"],
        "use_conv_bias": sizes["conv_bias"],
        "use_bias": sizes["proj_bias"],
        "layer_norm_epsilon": epsilon(metadata),
    }


def lfm2(metadata: Metadata) -> Config:
    """Return the configuration of LFM2: layers without K/V heads are convolutions."""
    found = dense(metadata)
    heads = metadata.integers(metadata.own("attention.head_count_kv"), found["num_hidden_layers"])
    return {
        **found,
        "norm_eps": found["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.integer(metadata.own("shortconv.l_cache")),
        "conv_bias": _has(metadata, "shortconv.in_proj.bias"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


def qwen3_5(metadata: Metadata) -> Config:
    """Return the configuration of Qwen3.5, without its multi-token prediction layers."""
    own, integer = metadata.own, metadata.integer
    values = integer(own("ssm.time_step_rank"))
    return {
        **dense(metadata),
        "full_attention_interval": integer(own("full_attention_interval"), 4),
        "linear_conv_kernel_dim": integer(own("ssm.conv_kernel")),
        "linear_key_head_dim": integer(own("ssm.state_size")),
        "linear_num_key_heads": integer(own("ssm.group_count")),
        "linear_num_value_heads": values,
        "linear_value_head_dim": integer(own("ssm.inner_size")) // max(values, 1),
    }


def window(metadata: Metadata) -> int | None:
    """Return the sliding window; None without one, which a file may write as 0."""
    return metadata.integer(metadata.own("attention.sliding_window"), 0) or None


def num_layers(metadata: Metadata) -> int:
    """Return the number of decoder layers. Multi-token prediction layers follow them in a file, and are not read."""
    own, integer = metadata.own, metadata.integer
    if integer(own("block_count")) > MAX_LAYERS:
        raise metadata.refusal(own("block_count"), f"at most {MAX_LAYERS} layers")
    return max(integer(own("block_count")) - integer(own("nextn_predict_layers"), 0), 0)


def common(metadata: Metadata, *, has_experts: bool = False) -> Config:
    """Return the fields common to all models."""
    own, integer = metadata.own, metadata.integer
    experts = integer(own("expert_count"), 0)
    if experts and not has_experts:
        text = f"{own('expert_count')}: a {metadata.architecture} model with mixture of experts is not supported, got {experts}."
        raise CheckpointError(f"{metadata.header.path}: {text}")
    embedding = metadata.tensors.get("token_embd.weight")
    return {
        "vocab_size": embedding.shape[0] if embedding is not None else integer(own("vocab_size")),
        "hidden_size": integer(own("embedding_length")),
        "num_hidden_layers": num_layers(metadata),
        "max_position_embeddings": integer(own("context_length")),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": token_id(metadata, "bos") if has_tokenizer(metadata) else None,
        "eos_token_id": end_token_ids(metadata) or None,
        "dtype": _dtype(metadata),
    }


def _dtype(metadata: Metadata) -> str:
    """Return the default compute dtype: the floating-point dtype of the matrices, else bfloat16."""
    kinds = {tensor.kind for tensor in metadata.tensors.values() if len(tensor.shape) == 2 and min(tensor.shape) > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else _DTYPE_OF_BLOCKS


def epsilon(metadata: Metadata) -> float:
    """Return the epsilon of RMSNorm."""
    return metadata.number(metadata.own("attention.layer_norm_rms_epsilon"))


def _attention(metadata: Metadata) -> Config:
    own, integer = metadata.own, metadata.integer
    layers = num_layers(metadata)
    heads = same(metadata, own("attention.head_count"), layers)
    hidden = integer(own("embedding_length"))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": same(metadata, own("attention.head_count_kv"), layers, default=heads),
        "head_dim": integer(own("attention.key_length"), hidden // max(heads, 1)),
        "attention_bias": _has(metadata, "attn_q.bias"),
        "rms_norm_eps": epsilon(metadata),
    }


def _mlp(metadata: Metadata) -> Config:
    """Return the MLP fields. The width is taken from tensors: hybrid models have another number in the metadata."""
    down = next((tensor for name, tensor in metadata.tensors.items() if name.endswith(".ffn_down.weight")), None)
    width = same(metadata, metadata.own("feed_forward_length"), num_layers(metadata)) if down is None else down.shape[-1]
    return {"intermediate_size": width, "hidden_act": "silu", "mlp_bias": _has(metadata, "ffn_up.bias")}


def same(metadata: Metadata, key: str, layers: int, default: int | None = None) -> int:
    """Return the value of a per-layer field that is equal for all layers that have one."""
    found = sorted(set(metadata.integers(key, layers, default)) - {0})
    if len(found) > 1:
        raise CheckpointError(f"{metadata.header.path}: {key}: expected one number for all layers, got {short_repr(found)}.")
    return found[0] if found else 0


def _multipliers(metadata: Metadata) -> Config:
    own, number = metadata.own, metadata.number
    head_dim = max(_attention(metadata)["head_dim"], 1)
    return {
        "attention_multiplier": number(own("attention.scale"), head_dim**-0.5) or head_dim**-0.5,
        "embedding_multiplier": number(own("embedding_scale"), 1.0) or 1.0,
        "residual_multiplier": number(own("residual_scale"), 1.0) or 1.0,
        "logits_scaling": number(own("logit_scale"), 1.0) or 1.0,
    }


def _kinds_of_hybrid(metadata: Metadata) -> list[bool]:
    """Return a flag for each layer: True for attention, which has K/V heads."""
    return [count > 0 for count in metadata.integers(metadata.own("attention.head_count_kv"), num_layers(metadata))]


def _mamba2(metadata: Metadata, prefix: str) -> Config:
    own, integer = metadata.own, metadata.integer
    inner, heads = integer(own("ssm.inner_size")), integer(own("ssm.time_step_rank"))
    sizes: Config = {
        "n_heads": heads,
        "d_head": inner // max(heads, 1),
        "d_state": integer(own("ssm.state_size")),
        "n_groups": integer(own("ssm.group_count")),
        "d_conv": integer(own("ssm.conv_kernel")),
        "expand": inner // max(integer(own("embedding_length")), 1),
        "conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "proj_bias": _has(metadata, "ssm_in.bias"),
    }
    return {f"{prefix}{name}": value for name, value in sizes.items()}


def _has(metadata: Metadata, tail: str) -> bool:
    return any(name.endswith(f".{tail}") for name in metadata.tensors)


def _rope(metadata: Metadata) -> Config:
    """Return theta, the rotated part of a head (partial RoPE), and the scaling."""
    own = metadata.own
    head_dim = max(_attention(metadata)["head_dim"], 1)
    rotated = metadata.integer(own("rope.dimension_count"), head_dim)
    part = {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}
    return {"rope_theta": metadata.number(own("rope.freq_base"), 10000.0), **part, "rope_scaling": _scaling(metadata)}


def _scaling(metadata: Metadata) -> Config | None:
    own, number = metadata.own, metadata.number
    if LONG_FACTORS in metadata.tensors:
        factor = own("rope.scaling.attn_factor")
        attention = {"attention_factor": number(factor)} if factor in metadata else {}
        factors = {"short_factor": vector(metadata, SHORT_FACTORS), "long_factor": vector(metadata, LONG_FACTORS)}
        return {"rope_type": "longrope", **factors, **attention}
    if ROPE_FACTORS in metadata.tensors:  # RoPE of Llama 3.1: a file stores its factor of each frequency
        divisors = vector(metadata, ROPE_FACTORS)
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": divisors, "long_factor": divisors}
    key = own("rope.scaling.type")
    kind, older = metadata.text(key, "none"), own("rope.scale_linear")
    if kind == "none" and older in metadata and number(older) not in (0, 1):
        return {"rope_type": "linear", "factor": number(older)}
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": number(own("rope.scaling.factor"))}
    if kind != "yarn":
        raise metadata.refusal(key, "none, linear, yarn, or longrope with its tensors of factors")
    named = {
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
        "mscale_all_dim": "yarn_log_multiplier",
    }
    found = {name: number(own(f"rope.scaling.{field}")) for name, field in named.items() if own(f"rope.scaling.{field}") in metadata}
    scales = {"mscale": 1.0} if found.get("mscale_all_dim") else {}
    original = metadata.integer(own("rope.scaling.original_context_length"))
    times = number(own("rope.scaling.factor"))
    return {"rope_type": "yarn", "factor": times, "original_max_position_embeddings": original, **scales, **found}


def vector(metadata: Metadata, name: str) -> list[float]:
    """Return the values of a small tensor."""
    tensor = metadata.tensors.get(name)
    if tensor is None or tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
        raise CheckpointError(f"{metadata.header.path}: {name}: expected a short vector in F32, got {tensor}.")
    found: list[float] = np.frombuffer(tensor.mapping, "<f4", count=tensor.shape[0], offset=tensor.offset).tolist()
    return found
