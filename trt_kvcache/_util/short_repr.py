"""Short texts of values for error messages, also of values whose ``repr`` is long or raises an error."""

from collections.abc import Mapping
from typing import Any

_MAX_LENGTH = 200

#: A longer object of JSON hides the sentence around it.
_MAX_OBJECT = 60


def short_repr(value: Any) -> str:
    """Return the ``repr`` of a value for an error message."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to print"
    except ValueError:
        name = type(value).__name__
        return "an int that is too large to print" if name == "int" else f"a {name} that cannot be printed"
    if isinstance(value, Mapping) and len(text) > _MAX_OBJECT:
        return f"an object with {len(value)} fields"
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}... ({len(text)} characters)"
