"""Values of this package as JSON, for ``--json``."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trt_kvcache.model import ModelConfig


def as_json(value: Any) -> Any:
    """Return a value in the types of JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ModelConfig):
        return value.to_description()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
