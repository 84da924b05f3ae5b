"""``Family``: what there is to know of one ``model_type`` of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"

#: Names of the weights of a layer, behind ``model.layers.<index>.`` and before ``.weight`` or ``.bias``, by what they are for.
LLAMA_NAMES: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}


#: Names of the weights of Mamba-2 in a layer that has them in ``mamba``.
MAMBA_NAMES: Mapping[str, str] = {
    "mamba_in": "mamba.in_proj",
    "conv": "mamba.conv1d",
    "a_log": "mamba.A_log",
    "d": "mamba.D",
    "dt_bias": "mamba.dt_bias",
    "mamba_norm": "mamba.norm",
    "mamba_out": "mamba.out_proj",
}

#: How the names of heads begin that draft tokens behind the next one.
DRAFT_HEADS = "mtp."


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    architecture: str
    title: str
    defaults: Mapping[str, Any]
    read: Callable[[ConfigFields], ModelConfig]
    embedding: str = EMBEDDING
    final_norm: str = FINAL_NORM
    layers: str = "model.layers"
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    head_by_head: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()
    code: frozenset[str] = frozenset()
