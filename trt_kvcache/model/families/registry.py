"""Registry of the supported families, and the choice of one by ``config.json``.

Anything unsupported is an error that names the field: a model is never run as if it were another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import (
    bamba,
    cohere2,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3_text,
    gemma4,
    gemma4_text,
    gemma4_unified,
    gemma4_unified_text,
    glm4,
    gpt_oss,
    granite,
    granitemoehybrid,
    hunyuan_v1_dense,
    lfm2,
    lfm2_moe,
    llama,
    mamba2,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    smollm3,
    stablelm,
    starcoder2,
)
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.refusals import EXPERTS, NO_WAY_OUT, unsupported
from trt_kvcache.model.families.towers import text_config
from trt_kvcache.model.model_config import ModelConfig

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        *(llama, mistral, ministral3, mistral3, qwen2, qwen2_5_vl, qwen3, qwen3_vl, phi3, gemma2, gemma3_text, gemma3),
        *(gemma4_text, gemma4, gemma4_unified_text, gemma4_unified, smollm3),
        *(olmo2, olmo3, granite, ernie4_5, exaone4, glm4, hunyuan_v1_dense, starcoder2, stablelm, cohere2),
        *(qwen3_moe, mixtral, olmoe, gpt_oss),
        *(qwen3_next, qwen3_5_text, qwen3_5, qwen3_5_moe_text, qwen3_5_moe, lfm2, lfm2_moe, mamba2, bamba, granitemoehybrid, nemotron_h),
        falcon_h1,
    )
}

_TABLE = "docs/models.md lists the supported families."

#: Fields that change the computation. A family that reads one of them lists it in ``uses``.
_REFUSED_FIELDS = {
    "vision_config": "is a vision model",
    "audio_config": "is an audio model",
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "kv_lora_rank": "has multi-head latent attention (MLA)",
    "is_encoder_decoder": "has an encoder",
    "add_cross_attention": "has cross attention",
    "cross_attention_layers": "has cross attention",
    "use_bidirectional_attention": "has bidirectional attention",
    "attn_logit_softcapping": "has attention logit softcapping",
    "final_logit_softcapping": "has final logit softcapping",
}

#: Fields of multimodal models, refused if no field above explains them: the text model is only a part.
_TEXT_CONFIG = {"text_config": "is more than a text decoder"}


def read_config(data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
    """Return the model of a parsed ``config.json``. Raises ConfigError for an unsupported or incomplete one."""
    family, text, fields = _decoder_fields(data, default_dtype)
    return replace(text.read(fields), family=family.name)


def read_mtp_config(data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
    """Return the MTP head of the model of a parsed ``config.json``. Raises ConfigError."""
    family, text, fields = _decoder_fields(data, default_dtype)
    if text.read_mtp is None:
        raise ConfigError(f"draft: expected a family whose MTP head is supported ({_with_mtp()}) for 'mtp', got {family.name}.")
    return replace(text.read_mtp(fields), family=family.name)


def _with_mtp() -> str:
    return ", ".join(name for name, family in FAMILIES.items() if family.read_mtp is not None)


def _decoder_fields(data: Mapping[str, Any], default_dtype: str | None) -> tuple[Family, Family, ConfigFields]:
    """Return the family of a ``config.json``, that of its decoder, and the fields of the decoder. Raises ConfigError."""
    fields = ConfigFields(data)
    _check_fields(fields, _known(fields.data))
    family = _family(fields)
    _check_code(fields, family)
    if not family.text:
        return family, family, _with_dtype(data, family, default_dtype)
    text, text_data = text_config(fields, family)
    text_fields = ConfigFields(text_data)
    _check_fields(text_fields, text)
    _check_code(text_fields, text)
    return family, text, _with_dtype(text_data, text, default_dtype)


def states_dtype(data: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` states the dtype of its decoder."""
    text = data.get("text_config")
    places = (data, text) if isinstance(text, Mapping) else (data,)
    return any(place.get(name) is not None for place in places for name in ("dtype", "torch_dtype"))


def _with_dtype(data: Mapping[str, Any], family: Family, default_dtype: str | None) -> ConfigFields:
    """Return the fields of a decoder."""
    dtype = {} if states_dtype(data) else {"dtype": default_dtype}
    return ConfigFields({**data, "model_type": family.name, **dtype}, defaults=family.defaults)


def _check_fields(fields: ConfigFields, family: Family | None) -> None:
    """Refuse fields that change the computation, unless the family reads them."""
    for features in (_REFUSED_FIELDS, _TEXT_CONFIG):
        found = {name: text for name, text in features.items() if fields.get(name) and not (family and name in family.uses)}
        if found:
            raise unsupported(fields, found, way_out=_way_out(fields))


def _known(data: Mapping[str, Any]) -> Family | None:
    model_type = data.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _way_out(fields: ConfigFields) -> str:
    """Return the reason why the text decoder of a model does not open either."""
    text = fields.get("text_config")
    family = _known(text) if isinstance(text, Mapping) else None
    if family is None:
        return NO_WAY_OUT
    return f"Its text decoder ({family.name}) cannot be opened from this checkpoint yet; docs/models.md lists the checkpoints that open."


def _family(fields: ConfigFields) -> Family:
    """Return the family by ``model_type``, or else by ``architectures``. If both are present, they must agree."""
    model_type = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise fields.refusal("architectures", "a list of names")
    if model_type is None:
        for family in FAMILIES.values():
            if _is_of(family, architectures):
                return family
        raise ConfigError(f"architectures: {short_repr(architectures)} is not supported, and there is no model_type. {_TABLE}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type: {short_repr(model_type)} is not supported.{_nearest(model_type)} {_TABLE}")
    family = FAMILIES[model_type]
    if architectures and not _is_of(family, architectures):
        raise ConfigError(f"architectures: expected {family.architecture} for model_type {model_type!r}, got {short_repr(architectures)}.")
    return family


def _nearest(model_type: Any) -> str:
    """Return a sentence with the families of similar names."""
    found = get_close_matches(model_type, FAMILIES) if isinstance(model_type, str) else []
    return f" Supported and of a similar name: {', '.join(found)}." if found else ""


def _is_of(family: Family, architectures: list[Any]) -> bool:
    return family.architecture in architectures or any(name in architectures for name in family.older_architectures)


def _check_code(fields: ConfigFields, family: Family) -> None:
    """Refuse custom code of a model, unless transformers has adopted it."""
    code = fields.get("auto_map")
    if code and not (isinstance(code, Mapping) and all(isinstance(name, str) and name in family.code for name in code.values())):
        raise unsupported(fields, {"auto_map": "needs code of its own (trust_remote_code)"})
