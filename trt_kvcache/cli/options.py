"""Kinds of command-line options that several commands have, and groups of options in dataclasses."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; everything else goes to stderr.")]


class WrongUsage(typer.BadParameter):
    """Options that do not fit each other: the message alone names them, so none is called invalid."""

    def format_message(self) -> str:
        """Return the message."""
        return self.message


def choice(kind: Any, *names: str, aliases: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Return an option that takes one of a few words."""
    aliases = {} if aliases is None else aliases
    words = [word for word in get_args(kind) if word not in aliases]

    def parse(text: str) -> str:
        word = aliases.get(text, text)
        if word not in words:
            raise typer.BadParameter(f"expected one of {', '.join(words)}, got {text!r}.")
        return word

    return typer.Option(*names, parser=parse, autocompletion=lambda: words, **{"metavar": "|".join(words), **options})


def logits_per_slot(**options: Any) -> Any:
    """Return the option ``--max-logits-per-slot``, which takes a number of tokens or ``all``."""

    def parse(text: str) -> int | str:
        if text == "all":
            return text
        try:
            number = int(text)
        except ValueError:
            number = 0
        if number < 1:
            raise typer.BadParameter(f"expected a number of tokens from 1, or all, got {text!r}.")
        return number

    return typer.Option("--max-logits-per-slot", parser=parse, metavar="TOKENS|all", **options)


def flat_parameters(command: Callable[..., object]) -> list[Parameter]:
    """Return the parameters of a command for typer: those whose type is a dataclass are replaced by its fields."""
    hints = get_type_hints(command, include_extras=True)
    flat = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            flat.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        of_fields = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = Parameter.empty if field.default is MISSING else field.default
            flat.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=of_fields[field.name]))
    return flat


def call_with_flat(command: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Call a command with the values of its :func:`flat_parameters`. In paths, ``~`` is the home folder."""
    left = {name: _expanded(value) for name, value in values.items()}
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if name != "return" and is_dataclass(kind)}
    made = {name: kind(**{field.name: left.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()}
    command(**left, **made)


def _expanded(value: Any) -> Any:
    """Return a value, with ``~`` at the start of its paths replaced: a shell leaves it after ``=``."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return [_expanded(item) for item in value] if isinstance(value, list) else value
