"""``Family``: one ``model_type`` of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"

#: Names of the per-layer embedding, of the projection of the hidden state that is added to its rows, and of the norm of that projection.
PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
PER_LAYER_PROJECTION = "model.per_layer_model_projection.weight"
PER_LAYER_NORM = "model.per_layer_projection_norm.weight"

#: Names of the weights of a layer by role, between ``model.layers.<index>.`` and ``.weight`` or ``.bias``.
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

#: Names of the weights of experts in layers whose MLP is called ``mlp``; each expert has tensors of its own.
EXPERT_NAMES: Mapping[str, str] = {
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class ExpertStack:
    """A tensor ``[experts, rows, ...]`` of all experts of a layer. Its rows are the outputs of some projections."""

    roles: tuple[str, ...]  # of the projections, in order
    suffix: str = ".weight"  # of their weights: ".weight" or ".bias"
    part: str = ""  # further suffix of the tensor, where a weight is stored as several ones
    is_interleaved: bool = False  # True if one row of each projection follows another, instead of all rows of it
    is_transposed: bool = False  # True if the tensor is [experts, inputs, rows]


#: Stacked expert tensors of a layer by name, the form of transformers 5.
STACKED_EXPERTS: Mapping[str, ExpertStack] = {
    "mlp.experts.gate_up_proj": ExpertStack(roles=("expert_gate", "expert_up")),
    "mlp.experts.down_proj": ExpertStack(roles=("expert_down",)),
}

#: Names of the weights of Mamba-2 in layers that have a module ``mamba``.
MAMBA_NAMES: Mapping[str, str] = {
    "mamba_in": "mamba.in_proj",
    "conv": "mamba.conv1d",
    "a_log": "mamba.A_log",
    "d": "mamba.D",
    "dt_bias": "mamba.dt_bias",
    "mamba_norm": "mamba.norm",
    "mamba_out": "mamba.out_proj",
}

#: Names of the weights of layers with Mamba-2 and attention under the names of Bamba.
BAMBA_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    **MAMBA_NAMES,
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}

#: Prefixes of multi-token prediction heads.
DRAFT_HEADS = "mtp."

#: Weights that merge the embedding of a token and a hidden state into the input of an MTP head. Its layer and its final norm are read under
#: the names of the model of which it is the head.
MERGED_EMBEDDING_NORM = "mtp.pre_fc_norm_embedding.weight"
MERGED_HIDDEN_NORM = "mtp.pre_fc_norm_hidden.weight"
MERGE_PROJECTION = "mtp.fc.weight"

#: The same of an EAGLE-3 head, of which the linear map merges several hidden states.
EAGLE3_EMBEDDING_NORM = "model.layers.0.input_layernorm.weight"
EAGLE3_HIDDEN_NORM = "model.layers.0.hidden_norm.weight"
EAGLE3_PROJECTION = "fc.weight"

#: Linear maps of an assistant: from the embedding of a token and a hidden state of the model, side by side, and back to such a state; the
#: centroids of its clusters of token ids.
PRE_PROJECTION = "pre_projection.weight"
POST_PROJECTION = "post_projection.weight"
CENTROIDS = "masked_embedding.centroids.weight"

#: Prefix of the layers and the final norm of a model whose MTP head is read.
_OF_MODEL = "(model)."


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str  # model_type of transformers
    architecture: str  # class name in `architectures`
    title: str  # common name
    defaults: Mapping[
        str, Any
    ]  # defaults in transformers that are not null; a field that is null in the file is not set, but takes no default
    read: Callable[[ConfigFields], ModelConfig]  # fields with defaults -> the model
    embedding: str = EMBEDDING
    final_norm: str = FINAL_NORM  # the head is lm_head.weight in all families
    layers: str = "model.layers"  # prefix of a layer's index
    # Names of a layer's weights by role, like LLAMA_NAMES. Roles of equal name are the rows of one tensor, in the order of layer_parts.
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    # Tensors of all experts of a layer by name. They are read as one tensor for each expert and role, under the names of `names`, in which
    # {expert} is its number.
    stacked: Mapping[str, ExpertStack] = field(default_factory=dict)
    # Names of tensors that hold all parts of the first head (of queries; in a gated delta net of keys), then of the next one.
    head_by_head: frozenset[str] = frozenset()
    # True if RoPE rotates adjacent elements of a head. Rows of q and k are reordered when they are read, so that it pairs two halves.
    interleaved_rope: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)  # prefixes of older files and of models that contain this one, and ours
    renamed_in_layers: Mapping[str, str] = field(default_factory=dict)  # the same for prefixes after a layer's index
    ignored: tuple[str, ...] = ()  # prefixes, after renaming, of tensors outside the decoder; transformers ignores them too
    uses: frozenset[str] = frozenset()  # fields of registry's list of refused ones that this family reads
    older_architectures: frozenset[str] = frozenset()  # class names of custom code that transformers has adopted under the other name
    code: frozenset[str] = frozenset()  # custom code in `auto_map` that transformers has adopted
    text: tuple[Family, ...] = ()  # families of the `text_config` of a model with a tower, the default one first; see `towers.py`
    may_be_flat: bool = False  # fields of a `text_config` may be next to those of the tower
    read_mtp: Callable[[ConfigFields], ModelConfig] | None = None  # fields with defaults -> the MTP head, with `merge_norm`
    mtp_names: Mapping[str, str] = field(
        default_factory=dict
    )  # prefixes of tensors of the MTP head, and ours of MERGED_EMBEDDING_NORM etc.
    images_need: str = ""  # computation of images beyond rows in the places of tokens, which no engine has

    def own_name(self, stored: str) -> str:
        """Return the name that this family has for a stored tensor."""
        name = _with_new_prefix(stored, self.renamed)
        layer = re.fullmatch(rf"({re.escape(self.layers)}\.\d+\.)(.+)", name) if self.renamed_in_layers else None
        return name if layer is None else layer[1] + _with_new_prefix(layer[2], self.renamed_in_layers)

    def of_mtp_head(self) -> Family:
        """Return the family under whose names the MTP head of a checkpoint is read, with the embedding and the head of the model alone."""
        norm = self.final_norm.removesuffix("weight")
        head = {f"{DRAFT_HEADS}layers.": f"{self.layers}.", f"{DRAFT_HEADS}norm.": norm}
        stored = [self.layers, norm, *(old + name.removeprefix(new) for old, new in self.renamed.items() for name in (self.layers, norm))]
        others = [prefix for prefix in self.ignored if prefix != DRAFT_HEADS]
        layers_of_model = dict.fromkeys(stored, _OF_MODEL)
        return replace(self, renamed={**self.mtp_names, **head, **layers_of_model, **self.renamed}, ignored=(_OF_MODEL, *others))

    def ignores(self, stored: str) -> bool:
        """Return True for a stored tensor outside the decoder."""
        return self.own_name(stored).startswith(self.ignored)


def _with_new_prefix(name: str, renamed: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in renamed if name.startswith(prefix)), "")
    return renamed.get(prefix, "") + name.removeprefix(prefix)
