"""Parsing JSON from untrusted sources: every fault is a ``ValueError``."""

import json
from typing import Any

#: Limit of nested objects and lists. No file that this package reads needs a tenth of it.
MAX_DEPTH = 100


class JSONTextError(ValueError):
    """A text that is not JSON, or JSON that cannot be used. The message has neither the file nor a full stop."""


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; bytes are UTF-8. Raises a :class:`JSONTextError`."""
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        raise JSONTextError(f"expected JSON, got a syntax error: {error}") from error
    except UnicodeDecodeError as error:
        raise JSONTextError(f"expected JSON in UTF-8, got byte {error.object[error.start]:#04x} at {error.start}") from error
    except RecursionError:
        raise JSONTextError(f"expected JSON, got values nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:  # the only one that is left: int() limits its digits
        raise JSONTextError("expected JSON, got an integer of more than 4300 digits") from error
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise JSONTextError(f"expected JSON, got values nested more than {MAX_DEPTH} deep")
