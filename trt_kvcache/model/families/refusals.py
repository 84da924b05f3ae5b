"""Error texts for refused models: name, unsupported features, and a way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.model.config_fields import ConfigFields

EXPERTS = "has a mixture of experts (MoE)"

NO_WAY_OUT = "There is no way around that yet; docs/models.md lists the checkpoints that open."

_MAX_NAME = 60


def unsupported(fields: ConfigFields, found: Mapping[str, str], *, where: str = "", way_out: str = NO_WAY_OUT) -> ConfigError:
    """Return the error for a model with unsupported features (``found``: by field), for the caller to raise. It shows no values."""
    features = list(dict.fromkeys(found.values()))
    listed = " and ".join([", ".join(features[:-1]), features[-1]] if len(features) > 1 else features)
    verb = "are" if len(features) > 1 else "is"
    return ConfigError(f"{', '.join(found)}: {named(fields)} {listed}{where}, which {verb} not supported. {way_out}")


def named(fields: ConfigFields) -> str:
    """Return the name of a model in messages: ``Gemma3 (model_type gemma3)``."""
    architectures, model_type = fields.get("architectures"), fields.get("model_type")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    name = first.split("For")[0] if isinstance(first, str) else ""
    return f"{name if name.isidentifier() and len(name) <= _MAX_NAME else 'this model'} (model_type {_short(model_type)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else short_repr(value)
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}..."
