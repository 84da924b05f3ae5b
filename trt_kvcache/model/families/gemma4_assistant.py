"""Gemma 4's assistants: folders of their own, with a few layers of Gemma 4 that read K and V of the model of which they are the assistant.

Read as transformers (``modeling_gemma4_assistant.py``) and vLLM (``gemma4_mtp.py``) do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trt_kvcache.errors import ConfigError
from trt_kvcache.model.assistant_input import AssistantInputConfig, TokenClusters
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.gemma4_text import kv_reader
from trt_kvcache.model.families.registry import FAMILIES, read_config
from trt_kvcache.model.families.towers import text_config
from trt_kvcache.model.model_config import ModelConfig

#: Tensor of the token ids by cluster: those of the first one, then those of the next one.
TOKEN_ORDERING = "masked_embedding.token_ordering"

#: ``model_type`` of assistants, and the family of their layers.
_TEXT = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}

#: Defaults in transformers.
_STATE_SIZES = {"gemma4_assistant": 1536, "gemma4_unified_assistant": 3840}
_CLUSTERS, _CHOSEN = 2048, 32


def is_assistant(data: Mapping[str, Any]) -> bool:
    """Return True for the ``config.json`` of an assistant."""
    name = data.get("model_type")
    return isinstance(name, str) and name in _TEXT


def read_assistant_config(data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
    """Return the assistant of a parsed ``config.json``, a Gemma 4 with ``assistant_input``. Raises ConfigError."""
    fields = ConfigFields(data)
    name = fields.get("model_type")
    if not is_assistant(data):
        raise fields.refusal("model_type", " or ".join(_TEXT))
    family = FAMILIES[_TEXT[name]]
    _, inner = text_config(fields, replace(family, name=name, text=(family,)))
    count = inner.get("num_hidden_layers")
    if inner.get("num_kv_shared_layers") not in (None, 0, count):
        raise ConfigError(f"num_kv_shared_layers: expected {count}, all layers, got {inner['num_kv_shared_layers']!r}.")
    for field in ("enable_moe_block", "use_double_wide_mlp"):
        if inner.get(field):
            raise ConfigError(f"{field}: expected false in an assistant, got {inner[field]!r}.")
    model = read_config({**inner, "model_type": family.name, "num_kv_shared_layers": 0}, default_dtype=default_dtype)
    if not model.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings: expected true in an assistant, got False.")
    if model.per_layer_embedding is not None:
        raise ConfigError(f"hidden_size_per_layer_input: expected 0 in an assistant, got {model.per_layer_embedding.size}.")
    state_size = fields.integer("backbone_hidden_size", _STATE_SIZES[name])
    stored = list(dict.fromkeys(layer.attention for layer in model.layers))
    places = {mixer: place for place, mixer in enumerate(stored)}
    layers = tuple(replace(layer, mixer=kv_reader(layer.attention, places[layer.attention])) for layer in model.layers)
    own = AssistantInputConfig(state_size=state_size, kv_layers=tuple(stored), clusters=_clusters(fields, model.vocab_size))
    # Its head has no soft cap, unlike that of Gemma 4.
    return replace(model, layers=layers, assistant_input=own, embedding_multiplier=state_size**0.5, final_softcap=None)


def _clusters(fields: ConfigFields, vocab_size: int) -> TokenClusters | None:
    """Return the clusters of the token ids; None if all tokens have logits."""
    if not fields.flag("use_ordered_embeddings", False):
        return None
    count = fields.integer("num_centroids", _CLUSTERS)
    if vocab_size % count:
        raise fields.refusal("num_centroids", f"a divisor of vocab_size={vocab_size}")
    return TokenClusters(count=count, chosen=fields.integer("centroid_intermediate_top_k", _CHOSEN))
