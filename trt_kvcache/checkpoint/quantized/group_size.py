"""The field ``group_size`` of several formats."""

from __future__ import annotations

from trt_kvcache._util.checks import int_in_range
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model.config_fields import ConfigFields


def group_size_of(fields: ConfigFields) -> int | None:
    """Return the number of inputs that share a scale; None for all, written as -1."""
    if "group_size" not in fields:
        raise ConfigError("quantization_config.group_size: expected a positive integer, or -1 for one group, got none.")
    size = fields.get("group_size")
    if size == -1 and not isinstance(size, bool):
        return None
    return int_in_range("quantization_config.group_size", size, 1, MAX_DIMENSION, error=ConfigError)
