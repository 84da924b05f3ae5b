"""The configuration of Gemma 4, from the metadata of a GGUF file and from the tensors that it has."""

from __future__ import annotations

import math

import numpy as np

from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.model_config import ROPE_FACTORS, Config, common, epsilon, layer_types, router_fields, same, vector
from trt_kvcache.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"

#: Factors of a frequency from which on an element of a head does not turn: llama.cpp writes 1e30.
_STILL = 1e20


def gemma4(metadata: Metadata) -> Config:
    """Return the configuration of Gemma 4."""
    own, integer = metadata.own, metadata.integer
    found, pattern = common(metadata, has_experts=True), own("attention.sliding_window_pattern")
    layers = found["num_hidden_layers"]
    if not isinstance(metadata.header.fields.get(pattern), np.ndarray):
        raise metadata.refusal(pattern, f"{layers} flags, one for each layer")
    kinds, shared = layer_types(metadata, 0, layers, has_window=True), integer(own("attention.shared_kv_layers"), 0)
    heads = metadata.integers(own("attention.head_count_kv"), layers)
    sizes = {_FULL: _head_dim(metadata, ""), _SLIDING: _head_dim(metadata, "_swa")}
    return {
        **found,
        "num_attention_heads": same(metadata, own("attention.head_count"), layers),
        "num_key_value_heads": max(heads, default=0),
        "head_dim": sizes[_SLIDING],
        "per_layer_config": {
            str(layer): {"head_dim": sizes[kind], "num_key_value_heads": count}
            for layer, (kind, count) in enumerate(zip(kinds, heads, strict=True))
        },
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(
            kind == _FULL and f"blk.{layer}.attn_v.weight" not in metadata.tensors for layer, kind in enumerate(kinds[: layers - shared])
        ),
        **_mlp(metadata, layers, shared),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": integer(own("attention.sliding_window")),
        "rms_norm_eps": epsilon(metadata),
        "rope_parameters": _ropes(metadata, sizes[_FULL]),
        "final_logit_softcapping": metadata.number(own("final_logit_softcapping"), 0.0) or None,
        **_per_layer_embedding(metadata),
        **_experts(metadata),
    }


def _mlp(metadata: Metadata, layers: int, shared: int) -> Config:
    """Return the width of MLPs, which may be twice as large in the last ``shared`` layers."""
    key = metadata.own("feed_forward_length")
    widths = metadata.integers(key, layers)
    width, is_wide = widths[0] if widths else 0, len(set(widths)) > 1
    if is_wide and not all(one == (width if layer < layers - shared else 2 * width) for layer, one in enumerate(widths)):
        raise metadata.refusal(key, f"{width}, or twice that in the {shared} layers that read K and V of others")
    return {"intermediate_size": width, "use_double_wide_mlp": is_wide}


def _head_dim(metadata: Metadata, ending: str) -> int:
    """Return the size of a head of K, which is also that of V and the number of elements that RoPE pairs."""
    size = metadata.integer(metadata.own(f"attention.key_length{ending}"))
    for name in (f"attention.value_length{ending}", f"rope.dimension_count{ending}"):
        if metadata.integer(metadata.own(name), size) != size:
            raise metadata.refusal(metadata.own(name), f"{size}, the length of a key")
    return size


def _ropes(metadata: Metadata, head_dim: int) -> Config:
    """Return the RoPE of both types of layers. In full attention, a factor of each frequency tells the turning elements of a head."""
    own, values = metadata.own, np.array(vector(metadata, ROPE_FACTORS))
    turning = int((values == 1).sum())
    if len(values) != head_dim // 2 or (values[:turning] != 1).any() or (values[turning:] < _STILL).any():
        expected = f"{head_dim // 2} factors: 1, and then numbers that stop the rest of a head"
        raise CheckpointError(f"{metadata.header.path}: {ROPE_FACTORS}: expected {expected}, got others.")
    if metadata.text(own("rope.scaling.type"), "none") != "none":
        raise metadata.refusal(own("rope.scaling.type"), "none")
    part = turning / max(head_dim // 2, 1)
    if int(part * head_dim // 2) < turning:  # the quotient is rounded down
        part = math.nextafter(part, 1.0)
    return {
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": metadata.number(own("rope.freq_base"))},
        _SLIDING: {"rope_type": "default", "rope_theta": metadata.number(own("rope.freq_base_swa"), 10000.0)},
    }


def _per_layer_embedding(metadata: Metadata) -> Config:
    """Return the sizes of the per-layer embedding; a size of 0 without one."""
    size, table = metadata.integer(metadata.own("embedding_length_per_layer_input"), 0), metadata.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **rows}


def _experts(metadata: Metadata) -> Config:
    """Return the fields of experts; a flag alone without them."""
    if not metadata.integer(metadata.own("expert_count"), 0):
        return {"enable_moe_block": False}
    sizes = {"moe_intermediate_size": metadata.integer(metadata.own("expert_feed_forward_length"))}
    return {"enable_moe_block": True, **router_fields(metadata, "num_experts", "top_k_experts"), **sizes}
