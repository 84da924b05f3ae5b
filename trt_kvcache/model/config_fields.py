"""Typed access to the fields of a ``config.json``. Errors name the field, the expected and the actual value."""

import math
from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.short_repr import short_repr
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION


class ConfigFields:
    """The fields of one JSON object. A field that is ``null`` is not set.

    ``prefix``: path of the object in error messages. ``defaults``: values of absent fields. A null field takes one only if it is required.
    """

    def __init__(self, data: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.data: Mapping[str, Any] = {**(defaults or {}), **data}
        self._prefix = prefix
        self._defaults = defaults or {}

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the unchecked value of a field; None if it is absent."""
        return self.data.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive int32; a field without a default is required."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(name, "a positive integer")
        if value > MAX_DIMENSION:
            raise self.refusal(name, f"an integer of at most {MAX_DIMENSION}")
        return value

    def count(self, name: str, default: int) -> int:
        """Return an integer, which may be 0 or negative."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive finite number; a field without a default is required."""
        value = self._required(name, default)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.refusal(name, "a finite number > 0")
        return number

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a required list of positive finite numbers."""
        values = self._required(name, None)
        if not isinstance(values, list):
            raise self.refusal(name, "a list of numbers")
        item = ConfigFields({f"{name}[{index}]": value for index, value in enumerate(values)}, self._prefix)
        return tuple(item.number(f"{name}[{index}]") for index in range(len(values)))

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field that holds one id, a list of ids, or nothing."""
        value = self.data.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or abs(item) > MAX_DIMENSION for item in values):
            raise self.refusal(name, "a token id or a list of token ids")
        return tuple(values)

    def refusal(self, name: str, expected: str) -> ConfigError:
        """Return the error for an unsupported value, for the caller to raise. ``expected``: the supported values, in words."""
        return ConfigError(f"{self._prefix}{name}: expected {expected}, got {short_repr(self.data.get(name))}.")

    def _required(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        default = self._defaults.get(name) if default is None else default
        if default is None:
            raise ConfigError(f"{self._prefix}{name}: expected a value, got none.")
        return default
