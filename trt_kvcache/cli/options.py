"""Kinds of command-line options that several commands have."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; everything else goes to stderr.")]


def choice(kind: Any, *names: str, **options: Any) -> Any:
    """Return an option that takes one of a few words.

    Parameters
    ----------
    kind : Literal
        The words.
    *names : str
        The names of the option.
    **options
        As those of ``typer.Option``.

    Returns
    -------
    typer option
        Another word is wrong usage, in the same words as everywhere in this package.
    """
    words = get_args(kind)

    def parse(text: str) -> str:
        if text not in words:
            raise typer.BadParameter(f"expected one of {', '.join(words)}, got {text!r}.")
        return text

    return typer.Option(*names, parser=parse, autocompletion=lambda: list(words), **{"metavar": "|".join(words), **options})


def expanded(path: Path) -> Path:
    """Return a path with ``~`` replaced by the home folder, as a shell leaves it after ``=``."""
    return path.expanduser() if str(path).startswith("~") else path
