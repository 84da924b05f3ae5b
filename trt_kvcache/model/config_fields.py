"""Typed access to the fields of a ``config.json``: every error names the field, the expected value and the actual one."""

import math
from collections.abc import Mapping
from typing import Any

from trt_kvcache._util.shown import shown
from trt_kvcache.errors import ConfigError
from trt_kvcache.memory.shapes import MAX_DIMENSION


class ConfigFields:
    """The fields of one JSON object. A field that is ``null`` counts as absent.

    Parameters
    ----------
    data : mapping of str to object
        The parsed JSON object.
    prefix : str
        Put before the names of fields in error messages (``"rope_parameters."``).
    defaults : mapping of str to object, optional
        Values of fields that the object does not have, and of required ones that are ``null``.

    Attributes
    ----------
    data : mapping of str to object
        The object with the defaults.
    """

    def __init__(self, data: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self.data: Mapping[str, Any] = {**(defaults or {}), **data}
        self._prefix = prefix
        self._defaults = defaults or {}

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the unchecked value of a field.

        Parameters
        ----------
        name : str
            The field.

        Returns
        -------
        object
            None if the field is absent.
        """
        return self.data.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer.

        Parameters
        ----------
        name : str
            The field.
        default : int, optional
            Returned if the field is absent. Without a default the field is required.

        Returns
        -------
        int
            Greater than 0.

        Raises
        ------
        ConfigError
            The value is not a positive integer that an int32 can hold, or a required field is absent.
        """
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refusal(name, "a positive integer")
        if value > MAX_DIMENSION:
            raise self.refusal(name, f"an integer of at most {MAX_DIMENSION}")
        return value

    def count(self, name: str, default: int) -> int:
        """Return an integer that may be 0 or negative.

        Parameters
        ----------
        name : str
            The field.
        default : int
            Returned if the field is absent.

        Returns
        -------
        int
            The value.

        Raises
        ------
        ConfigError
            The value is not an integer.
        """
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, "an integer")
        return value

    def null(self, name: str) -> bool:
        """Tell whether a field is there and ``null``, which switches off what it describes.

        Parameters
        ----------
        name : str
            The field.

        Returns
        -------
        bool
            False if the field is absent.
        """
        return name in self.data and self.data[name] is None

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive finite number.

        Parameters
        ----------
        name : str
            The field.
        default : float, optional
            Returned if the field is absent. Without a default the field is required.

        Returns
        -------
        float
            Greater than 0.

        Raises
        ------
        ConfigError
            The value is not a finite number > 0, or a required field is absent.
        """
        value = self._required(name, default)
        try:
            number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.refusal(name, "a finite number > 0")
        return number

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of positive finite numbers.

        Parameters
        ----------
        name : str
            The field.

        Returns
        -------
        tuple of float
            As many as the list has.

        Raises
        ------
        ConfigError
            The value is not a list, or holds anything else; or the field is absent.
        """
        values = self._required(name, None)
        if not isinstance(values, list):
            raise self.refusal(name, "a list of numbers")
        item = ConfigFields({f"{name}[{index}]": value for index, value in enumerate(values)}, self._prefix)
        return tuple(item.number(f"{name}[{index}]") for index in range(len(values)))

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean.

        Parameters
        ----------
        name : str
            The field.
        default : bool
            Returned if the field is absent.

        Returns
        -------
        bool
            The value.

        Raises
        ------
        ConfigError
            The value is not a boolean.
        """
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return token ids from a field that holds one id, a list of ids, or nothing.

        Parameters
        ----------
        name : str
            The field.

        Returns
        -------
        tuple of int
            Empty if the field is absent.

        Raises
        ------
        ConfigError
            The value is not a token id or a list of them.
        """
        value = self.data.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or abs(item) > MAX_DIMENSION for item in values):
            raise self.refusal(name, "a token id or a list of token ids")
        return tuple(values)

    def refusal(self, name: str, expected: str) -> ConfigError:
        """Return the error for a field whose value is not supported, for the caller to raise.

        Parameters
        ----------
        name : str
            The field.
        expected : str
            What would be accepted, in words.

        Returns
        -------
        ConfigError
            It names the field, what was expected, and the value.
        """
        return ConfigError(f"{self._prefix}{name}: expected {expected}, got {shown(self.data.get(name))}.")

    def _required(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        default = self._defaults.get(name) if default is None else default
        if default is None:
            raise ConfigError(f"{self._prefix}{name}: expected a value, got none.")
        return default
