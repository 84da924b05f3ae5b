"""Typed access to the fields of a ``config.json``: every refusal names the field, what was expected and what came."""

import math
from collections.abc import Mapping
from typing import Any

from trt_kvcache.errors import ConfigError


class ConfigFields:
    """The fields of one JSON object. ``null`` counts as absent.

    ``data``: mapping. As read from JSON.
    ``prefix``: Put before a field's name in messages (``"rope_parameters."``).
    """

    def __init__(self, data: Mapping[str, Any], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the field as it came, ``None`` where it is absent."""
        return self._data.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive int; without a default the field is required."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number > 0 as float; without a default the field is required."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.refusal(name, "a finite number > 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return token ids from an int, a list of ints, or nothing."""
        value = self._data.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
            raise self.refusal(name, "a token id or a list of token ids")
        return tuple(values)

    def refusal(self, name: str, expected: str) -> ConfigError:
        """Build the error that a field's value is not what is supported."""
        return ConfigError(f"{self._prefix}{name}: expected {expected}, got {self._data.get(name)!r}.")

    def _required(self, name: str, default: Any) -> Any:
        value = self._data.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self._prefix}{name}: expected a value, got none.")
        return default
