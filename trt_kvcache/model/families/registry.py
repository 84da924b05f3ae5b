"""The families that this package knows, and which one a ``config.json`` belongs to.

Anything that is not supported is an error that names the field: a model is never run as if it were a different one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.shown import shown
from trt_kvcache.dtypes import MODEL_DTYPES
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families import (
    bamba,
    gemma2,
    gemma3_text,
    granite,
    granitemoehybrid,
    lfm2,
    llama,
    mamba2,
    ministral3,
    mistral,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_5_text,
    qwen3_next,
    smollm3,
)
from trt_kvcache.model.families.family import Family
from trt_kvcache.model.model_config import ModelConfig
from trt_kvcache.model.rope import ROPE_KINDS

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        *(llama, mistral, ministral3, qwen2, qwen3, phi3, gemma2, gemma3_text, smollm3, olmo2, granite),
        *(qwen3_next, qwen3_5_text, lfm2, mamba2, bamba, granitemoehybrid, nemotron_h),
    )
}

SUPPORTED = (
    f"Supported: causal language models of {', '.join(FAMILIES)}, RoPE {', '.join(ROPE_KINDS)}, weights in {', '.join(MODEL_DTYPES)}."
)

#: Fields that change what a model computes. A family that reads one of them says so.
_REFUSED_FIELDS = {
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "text_config": "more than a text decoder",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "is_encoder_decoder": "cross attention to an encoder",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
    "use_bidirectional_attention": "attention to later tokens",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
}


def read_config(data: Mapping[str, Any], *, default_dtype: str | None = None) -> ModelConfig:
    """Read a ``config.json``: see :meth:`trt_kvcache.ModelConfig.from_dict`.

    Parameters
    ----------
    data : mapping of str to object
        The parsed file.
    default_dtype : str, optional
        The dtype for a file that does not name one.

    Returns
    -------
    ModelConfig
        The model.

    Raises
    ------
    ConfigError
        The model is not supported, or the file is incomplete.
    """
    fields = ConfigFields(data)
    known = FAMILIES.get(str(fields.get("model_type")))
    for name, meaning in _REFUSED_FIELDS.items():
        if fields.get(name) and not (known and name in known.uses):
            raise ConfigError(f"{name}: a model with {meaning} is not supported, got {shown(fields.get(name))}. {SUPPORTED}")
    family = _family(fields)
    _check_code(fields, family)
    has_dtype = any(name in fields for name in ("dtype", "torch_dtype"))
    dtype = {} if has_dtype else {"dtype": default_dtype}
    return family.read(ConfigFields({**data, "model_type": family.name, **dtype}, defaults=family.defaults))


def _family(fields: ConfigFields) -> Family:
    """Choose the family by ``model_type``, or by ``architectures`` if there is no ``model_type``. If both are present, they must agree."""
    model_type = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise fields.refusal("architectures", "a list of names")
    if model_type is None:
        for family in FAMILIES.values():
            if family.architecture in architectures:
                return family
        raise ConfigError(f"architectures: {shown(architectures)} is not supported, and there is no model_type. {SUPPORTED}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type: {shown(model_type)} is not supported. {SUPPORTED}")
    family = FAMILIES[model_type]
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"architectures: expected {family.architecture} for model_type {model_type!r}, got {shown(architectures)}. {SUPPORTED}"
        )
    return family


def _check_code(fields: ConfigFields, family: Family) -> None:
    """Refuse code that comes with the model, except where transformers has taken it over."""
    code = fields.get("auto_map")
    if code and not (isinstance(code, Mapping) and all(isinstance(name, str) and name in family.code for name in code.values())):
        raise ConfigError(f"auto_map: a model with custom code (trust_remote_code) is not supported, got {shown(code)}. {SUPPORTED}")
