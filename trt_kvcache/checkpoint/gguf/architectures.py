"""What there is to know of each ``general.architecture``: its family in transformers, its configuration, its names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.checkpoint.gguf.metadata import Metadata
from trt_kvcache.checkpoint.gguf.model_config import dense_config

#: Names of tensors outside the layers, without their endings.
MODEL_NAMES: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

#: Names of tensors behind ``blk.<index>.`` and behind ``model.layers.<index>.``.
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF.

    Parameters
    ----------
    family : str
        The ``model_type`` of transformers.
    config : callable
        Takes the metadata, returns the fields of ``config.json`` but for ``model_type``.
    names : mapping of str to str
        Like :data:`MODEL_NAMES`.
    layer_names : mapping of str to str
        Like :data:`LAYER_NAMES`.
    paired_rows : mapping of str to str
        Projections whose rows that RoPE pairs are beside each other in GGUF, and apart in transformers; and the field that counts heads.
    """

    family: str
    config: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    paired_rows: Mapping[str, str] = field(default_factory=dict)


_PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(family="llama", config=dense_config, paired_rows=_PAIRED),
    "qwen2": Architecture(family="qwen2", config=dense_config),
    "qwen3": Architecture(family="qwen3", config=dense_config),
}
