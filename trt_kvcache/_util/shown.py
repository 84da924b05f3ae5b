"""Values as error messages show them: never too long, and never an error of their own."""

from collections.abc import Mapping
from typing import Any

_MAX_LENGTH = 200

#: A longer object of JSON hides the sentence around it.
_MAX_OBJECT = 60


def shown(value: Any) -> str:
    """Return the ``repr`` of a value for an error message.

    Parameters
    ----------
    value : object
        Anything that a caller or a file gave.

    Returns
    -------
    str
        At most a few hundred characters. Of a long mapping only its size. The name of the type where there is no ``repr``: Python refuses
        to print an integer of more than 4300 digits, and lists that are nested too deeply.

    Examples
    --------
    >>> shown("float16"), shown(10**5000), shown({"depth": 32}), shown(dict.fromkeys(range(99)))
    ("'float16'", 'an int that is too large to print', "{'depth': 32}", 'an object with 99 fields')
    """
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
