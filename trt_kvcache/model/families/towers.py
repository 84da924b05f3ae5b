"""Models with a vision tower, of which only the text decoder is read: its fields are in ``text_config``, its tensors have a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields
from trt_kvcache.model.families.family import Family

#: Prefixes of the text decoder where the model is ``language_model`` and its tower ``vision_tower``: of transformers 4, and of 5.
LLAVA_NAMES: Mapping[str, str] = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}

#: Prefixes of their towers.
LLAVA_TOWERS = tuple(f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))

#: Prefix of the text decoder, and of the tower, in Qwen's models.
QWEN_NAMES: Mapping[str, str] = {"model.language_model.": "model."}
QWEN_TOWERS = ("model.visual.",)

#: Fields of the whole model, which are none of a text decoder next to them.
_WHOLE = ("architectures", "model_type", "text_config", "vision_config")

#: Fields of the text decoder that files have in ``text_config``, next to it, or in both places.
_ONE_VALUE = ("dtype", "torch_dtype", "tie_word_embeddings")
_SHARED = (*_ONE_VALUE, "bos_token_id", "eos_token_id")


def with_tower(
    *text: Family, name: str, architecture: str, title: str, renamed: Mapping[str, str], towers: tuple[str, ...], **changes: Any
) -> Family:
    """Return the family of models with a tower over a text decoder of one of the families ``text``, which name their tensors alike."""
    return replace(
        text[0],
        name=name,
        architecture=architecture,
        title=title,
        text=text,
        renamed=renamed,
        ignored=(*text[0].ignored, *towers),
        uses=text[0].uses | {"vision_config", "text_config"},
        **changes,
    )


def text_config(fields: ConfigFields, family: Family) -> tuple[Family, dict[str, Any]]:
    """Return the family of the text decoder of a model with a tower, and its ``config.json``.

    Token ids next to ``text_config`` take precedence, as in transformers.
    """
    given = fields.get("text_config")
    if given is None and family.may_be_flat:
        return family.text[0], {name: value for name, value in fields.data.items() if name not in _WHOLE}
    if not isinstance(given, Mapping):
        raise fields.refusal("text_config", "an object")
    for name in _ONE_VALUE:
        if name in fields and given.get(name) not in (None, fields.get(name)):
            values = f"{short_repr(fields.get(name))} and, in text_config, {short_repr(given[name])}"
            raise ConfigError(f"{name}: expected one value, got {values}.")
    model_type = given.get("model_type") or family.text[0].name
    text = next((text for text in family.text if text.name == model_type), None)
    if text is None:
        names = " or ".join(text.name for text in family.text)
        raise ConfigError(f"text_config.model_type: expected {names} for model_type {family.name!r}, got {short_repr(model_type)}.")
    return text, {**given, **{name: fields.get(name) for name in _SHARED if name in fields}}
