"""EAGLE-3 heads: folders of their own, with a Llama layer that reads hidden states of the model of which they are the head.

Read as SafeAILab/EAGLE (``cnets.py``), SGLang and vLLM (``llama_eagle3.py``) do; the format of ``speculators`` is read too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.eagle3_input import Eagle3InputConfig
from trt_kvcache.model.families import llama
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.registry import read_config
from trt_kvcache.model.model_config import ModelConfig

#: Tensor of the differences between token ids of the model and ids of the head. Its inverse in the files is not read.
TOKEN_OFFSETS = "d2t"
_INVERSE = "t2d"

#: Names of the tensors of a head, as those of a Llama.
HEAD_FAMILY: Family = replace(
    llama.FAMILY,
    renamed={
        "model.midlayer.": "model.layers.0.",
        "midlayer.": "model.layers.0.",
        "layers.": "model.layers.",
        "norm.": "model.norm.",
        "embed_tokens.": "model.embed_tokens.",
        "model.fc.": "fc.",
        "model.lm_head.": "lm_head.",
        "model.d2t": TOKEN_OFFSETS,
        "model.t2d": _INVERSE,
    },
    ignored=(_INVERSE,),
)

#: Fields that only draft heads have.
_FIELDS_OF_HEADS = ("draft_vocab_size", "eagle_config", "speculators_model_type")

#: Fields of variants of EAGLE-3, and their value in a head that is read. Variants of EAGLE-3.1 come first.
_OF_VARIANTS: Mapping[str, Any] = {
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), False),
    "bias": False,
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_draft_head(data: Mapping[str, Any]) -> bool:
    """Return True for the ``config.json`` of a draft head in a folder of its own: of EAGLE 1, 2 or 3, or of speculators."""
    return any("eagle" in name.lower() for name in _architectures(data)) or any(data.get(name) is not None for name in _FIELDS_OF_HEADS)


def read_eagle3_config(data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
    """Return the EAGLE-3 head of a parsed ``config.json``, a Llama of one layer with ``eagle3_input``. Raises ConfigError."""
    named = data.get("speculators_model_type")
    if named not in (None, "eagle3"):
        raise ConfigError(f"speculators_model_type: expected eagle3, got {short_repr(named)}.")
    inner = data.get("transformer_layer_config")
    if not (isinstance(inner, Mapping) or inner is None):
        raise ConfigError(f"transformer_layer_config: expected an object, got {short_repr(inner)}.")
    fields = ConfigFields({**(inner or {}), **{name: value for name, value in data.items() if inner is None or name != "model_type"}})
    _check_kind(fields)
    of_eagle = fields.get("eagle_config") or {}
    if not isinstance(of_eagle, Mapping):
        raise fields.refusal("eagle_config", "an object")
    for place, of_place in (("", fields), ("eagle_config.", ConfigFields(of_eagle, "eagle_config."))):
        for name, value in _OF_VARIANTS.items():
            if name in of_place and of_place.get(name) != value:
                raise ConfigError(f"{place}{name}: expected {str(value).lower()} in an EAGLE-3 head, got {of_place.get(name)!r}.")
    head = read_config(_as_llama(fields), default_dtype=default_dtype)
    layer, hidden = head.layers[0], head.hidden_size
    own = Eagle3InputConfig(
        norm=head.final_norm,
        state_size=fields.integer("target_hidden_size", hidden),
        num_logits=fields.integer("draft_vocab_size", head.vocab_size),
        state_layers=_state_layers(fields, of_eagle),
        adds_normalised=fields.flag("norm_before_residual", False),
    )
    if own.num_logits > head.vocab_size:
        raise fields.refusal("draft_vocab_size", f"at most vocab_size={head.vocab_size}")
    # The norm of the embedding takes the place of the norm before attention.
    reads = replace(layer, input_norm=None, mixer=replace(layer.attention, input_size=2 * hidden))
    return replace(head, layers=(reads,), eagle3_input=own)


def _architectures(data: Mapping[str, Any]) -> list[str]:
    names = data.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_kind(fields: ConfigFields) -> None:
    """Refuse heads of EAGLE 1 and 2, which the fields of EAGLE-3 do not name, and heads with layers of another family."""
    names = " ".join(_architectures(fields.data)).lower()
    if fields.get("model_type") == "eagle" or ("eagle" in names and "eagle3" not in names and "draft_vocab_size" not in fields):
        raise ConfigError(f"architectures: expected an EAGLE-3 head, got {short_repr(fields.get('architectures'))}, of EAGLE 1 or 2.")
    if fields.get("model_type") not in (None, "llama"):
        raise fields.refusal("model_type", "llama, the layer of an EAGLE-3 head")


def _as_llama(fields: ConfigFields) -> dict[str, Any]:
    """Return the fields of the layer, of a head whose code is known here."""
    data = {name: value for name, value in fields.data.items() if name != "auto_map"}
    return {**data, "architectures": [llama.FAMILY.architecture], "model_type": llama.FAMILY.name, "num_hidden_layers": 1}


def _state_layers(fields: ConfigFields, of_eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers before which the head reads hidden states; None if the file does not say."""
    # vLLM reads its own field as layers before which, SGLang and SpecForge one in `eagle_config` as layers after which the states are read.
    found = []
    for place, ids, offset in (("", fields.get(_LAYER_IDS), 0), ("eagle_config.", of_eagle.get(_LAYER_IDS), 1)):
        if ids in (None, []):  # ModelOpt writes an empty list for the default
            continue
        if not isinstance(ids, list) or not all(type(layer) is int and layer >= 0 for layer in ids):
            raise ConfigError(f"{place}{_LAYER_IDS}: expected indices of layers, got {short_repr(ids)}.")
        found.append(tuple(layer + offset for layer in ids))
    if len(set(found)) > 1:
        after = short_repr(of_eagle.get(_LAYER_IDS))
        raise ConfigError(f"{_LAYER_IDS}: expected layers after those of eagle_config, {after}, got {short_repr(fields.get(_LAYER_IDS))}.")
    return found[0] if found else None
