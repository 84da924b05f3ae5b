"""Option types that several commands share, and groups of options in dataclasses."""

import inspect
import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; everything else goes to stderr.")]


class WrongUsage(typer.BadParameter):
    """Options that contradict each other. The message names all of them, and calls none of them invalid."""

    def format_message(self) -> str:
        """Return the message."""
        return self.message


def choice(kind: Any, *names: str, aliases: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Return an option with a few words as values. ``aliases`` are accepted, but not listed."""
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


@dataclass(frozen=True)
class Changed:
    """Another help or default of an option, for one command: ``flags: Annotated[SessionFlags, Changed("max_batch_size", help=...)]``."""

    option: str
    help: str | None = None
    default: Any = None

    def apply(self, parameter: Parameter) -> Parameter:
        """Return the parameter of the option with the changes."""
        base, given = get_args(parameter.annotation)
        option = copy(given)
        option.help = self.help or given.help
        default = parameter.default if self.default is None else self.default
        return parameter.replace(annotation=Annotated[base, option], default=default)


def flat_parameters(command: Callable[..., object]) -> list[Parameter]:
    """Return the parameters of a command for typer, keyword-only: a dataclass is replaced by its fields."""
    hints = get_type_hints(command, include_extras=True)
    flat: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group, changes = _group(hints[name])
        if group is None:
            flat.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        field_hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = Parameter.empty if field.default is MISSING else field.default
            made = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=field_hints[field.name])
            flat.append(next((change.apply(made) for change in changes if change.option == field.name), made))
    return flat


def call_with_flat(command: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Call a command with the values of its :func:`flat_parameters`. In paths, ``~`` is the home folder."""
    left = {name: _expanded(value) for name, value in values.items()}
    groups = {name: _group(hint)[0] for name, hint in get_type_hints(command, include_extras=True).items()}
    made = {
        name: group(**{field.name: left.pop(field.name) for field in fields(group)}) for name, group in groups.items() if group is not None
    }
    command(**left, **made)


def _group(hint: Any) -> tuple[Any, tuple[Changed, ...]]:
    """Return the dataclass of a group of options, or None for a single option, and its changes."""
    kind, *changes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return (kind, tuple(changes)) if is_dataclass(kind) else (None, ())


def _expanded(value: Any) -> Any:
    """Replace ``~`` at the start of paths: the shell does not do so after ``=``."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return [_expanded(item) for item in value] if isinstance(value, list) else value
