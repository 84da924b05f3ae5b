"""Options of a dataclass as keyword arguments: listed and explained once, shown by every function that takes them."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The entry of a docstring that the parameters of the dataclass replace.
_ENTRY = "**options\n"


def show_as_keywords(kind: type[Any], function: _Function) -> _Function:
    """Show the fields of a dataclass in place of ``**options``: in ``inspect.signature``, and in the Parameters of the docstring."""
    own = inspect.signature(function)
    shown = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(kind)
    ]
    positional = [one for one in own.parameters.values() if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    others = [one for one in own.parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*positional, *shown, *others])  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # None with python -OO
        before, _, after = function.__doc__.partition(_ENTRY)
        indent = before.rpartition("\n")[2]
        _, _, rest = after.partition("\n")  # the description of **options is one line
        function.__doc__ = before.removesuffix(indent) + textwrap.indent(_parameters_section(kind), indent) + rest
    return function


def _parameters_section(kind: type[Any]) -> str:
    """Return the entries of the Parameters section of a class, without its heading."""
    lines = (inspect.getdoc(kind) or "").splitlines()
    start = lines.index("Parameters") + 2
    end = next((index for index in range(start, len(lines)) if lines[index].startswith("---")), len(lines) + 1) - 1
    return "\n".join(lines[start:end]).rstrip("\n") + "\n"
