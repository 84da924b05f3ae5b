"""Registry of the supported families, and the choice of one by ``config.json``.

Anything unsupported is an error that names the field: a model is never run as if it were another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import (
    bamba,
    cohere2,
    ernie4_5,
    exaone4,
    gemma2,
    gemma3_text,
    glm4,
    granite,
    granitemoehybrid,
    hunyuan_v1_dense,
    lfm2,
    llama,
    mamba2,
    ministral3,
    mistral,
    nemotron_h,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5_text,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
)
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.families.refusals import EXPERTS, NO_WAY_OUT, unsupported
from trt_kvcache.model.model_config import ModelConfig

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        *(llama, mistral, ministral3, qwen2, qwen3, phi3, gemma2, gemma3_text, smollm3, olmo2, olmo3, granite),
        *(ernie4_5, exaone4, glm4, hunyuan_v1_dense, starcoder2, stablelm, cohere2),
        *(qwen3_next, qwen3_5_text, lfm2, mamba2, bamba, granitemoehybrid, nemotron_h),
    )
}

SUPPORTED = f"Supported: the {len(FAMILIES)} families that docs/models.md lists."

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
    fields = ConfigFields(data)
    known = _known(fields.data)
    for features in (_REFUSED_FIELDS, _TEXT_CONFIG):
        found = {name: text for name, text in features.items() if fields.get(name) and not (known and name in known.uses)}
        if found:
            raise unsupported(fields, found, way_out=_way_out(fields))
    family = _family(fields)
    _check_code(fields, family)
    has_dtype = any(name in fields for name in ("dtype", "torch_dtype"))
    dtype = {} if has_dtype else {"dtype": default_dtype}
    return family.read(ConfigFields({**data, "model_type": family.name, **dtype}, defaults=family.defaults))


def _known(data: Mapping[str, Any]) -> Family | None:
    model_type = data.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


def _way_out(fields: ConfigFields) -> str:
    """Return the way to open only the text decoder of a model."""
    text = fields.get("text_config")
    family = _known(text) if isinstance(text, Mapping) else None
    if family is None:
        return NO_WAY_OUT
    if any("language_model" in prefix for prefix in family.renamed):
        return f"Its text decoder ({family.name}) opens with the text_config alone as config.json: see docs/models.md."
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
        raise ConfigError(f"architectures: {short_repr(architectures)} is not supported, and there is no model_type. {SUPPORTED}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type: {short_repr(model_type)} is not supported. {SUPPORTED}")
    family = FAMILIES[model_type]
    if architectures and not _is_of(family, architectures):
        raise ConfigError(f"architectures: expected {family.architecture} for model_type {model_type!r}, got {short_repr(architectures)}.")
    return family


def _is_of(family: Family, architectures: list[Any]) -> bool:
    return family.architecture in architectures or any(name in architectures for name in family.older_architectures)


def _check_code(fields: ConfigFields, family: Family) -> None:
    """Refuse custom code of a model, unless transformers has adopted it."""
    code = fields.get("auto_map")
    if code and not (isinstance(code, Mapping) and all(isinstance(name, str) and name in family.code for name in code.values())):
        raise unsupported(fields, {"auto_map": "needs code of its own (trust_remote_code)"})
