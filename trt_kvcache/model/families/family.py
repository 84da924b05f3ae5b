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
    """One family of models.

    Parameters
    ----------
    name : str
        The ``model_type`` of transformers.
    architecture : str
        The class name that ``architectures`` lists.
    title : str
        What people call it.
    defaults : mapping of str to object
        Fields that have a default in transformers which is not null. A field that is ``null`` in the file is not absent.
    read : callable
        Takes the fields of a ``config.json``, the defaults filled in, and returns the model.
    embedding, final_norm : str
        Names of the weights outside the layers. The head is ``lm_head.weight`` everywhere.
    layers : str
        What precedes the index of a layer in the names of its weights.
    names : mapping of str to str
        Like :data:`LLAMA_NAMES`. Weights of one name are stored in one tensor, row under row, in the order in which
        :func:`~trt_kvcache.model.weight_parts.layer_parts` lists them.
    head_by_head : frozenset of str
        Those of these names whose tensors hold first all that belongs to the first head (of queries; in a gated delta net of keys), then
        all that belongs to the next one.
    renamed : mapping of str to str
        How names of tensors may begin in files of older versions and of models that contain this one, and what that stands for.
    ignored : tuple of str
        How names of tensors begin that are no part of the decoder, after they are renamed: those that transformers leaves out too.
    uses : frozenset of str
        Fields that are refused where a family does not read them, and that this one reads.
    code : frozenset of str
        What ``auto_map`` may name: code that transformers has taken over.
    """

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
