"""The configuration of a model from the metadata of a GGUF file, with the fields of transformers' ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.tokenizer_files import end_token_ids, has_tokenizer, token_id

#: Types that hold a model's own dtype.
_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

#: What a model is computed in whose weights are in blocks: with the range of float32, in which nearly all models were trained.
_DTYPE_OF_BLOCKS = "bfloat16"


def model_dtype(metadata: Metadata) -> str:
    """Return what a model is computed in unless somebody says otherwise: the floats that its matrices are in, else bfloat16."""
    kinds = {tensor.kind for tensor in metadata.tensors.values() if len(tensor.shape) == 2 and tensor.shape[0] > 1}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} else _DTYPE_OF_BLOCKS


def dense_config(metadata: Metadata) -> dict[str, Any]:
    """Return the fields that decoders with attention have, with the names of Llama."""
    own, integer, number = metadata.own, metadata.integer, metadata.number
    heads = integer(own("attention.head_count"))
    hidden = integer(own("embedding_length"))
    head_dim = integer(own("attention.key_length"), hidden // heads if heads else 0)
    return {
        **common_config(metadata),
        "intermediate_size": integer(own("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(own("attention.head_count_kv"), heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": number(own("attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in metadata.tensors,
        **rope_config(metadata),
    }


def common_config(metadata: Metadata) -> dict[str, Any]:
    """Return the fields that all models have."""
    own, integer = metadata.own, metadata.integer
    embedding = metadata.tensors.get("token_embd.weight")
    ends = end_token_ids(metadata)
    return {
        "vocab_size": embedding.shape[0] if embedding is not None else integer(own("vocab_size")),
        "hidden_size": integer(own("embedding_length")),
        "num_hidden_layers": integer(own("block_count")),
        "max_position_embeddings": integer(own("context_length")),
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": token_id(metadata, "bos") if has_tokenizer(metadata) else None,
        "eos_token_id": ends or None,
        "dtype": model_dtype(metadata),
    }


def rope_config(metadata: Metadata) -> dict[str, Any]:
    """Return theta and the scaling of RoPE."""
    return {"rope_theta": metadata.number(metadata.own("rope.freq_base"), 10000.0), **_scaling(metadata)}


def _scaling(metadata: Metadata) -> Mapping[str, Any]:
    kind = metadata.text(metadata.own("rope.scaling.type"), "none")
    if kind == "none":
        return {}
    raise metadata.refusal(metadata.own("rope.scaling.type"), "none")
