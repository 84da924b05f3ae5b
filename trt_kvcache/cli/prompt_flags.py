"""``--prompt`` and ``--prompt-ids``, which ``generate`` and ``compare`` share."""

from collections.abc import Sequence
from typing import Annotated

import typer

from trt_kvcache.generation.prompts import Prompt

Prompts = Annotated[list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt. Can be given several times.")]
PromptIds = Annotated[
    list[str] | None, typer.Option(metavar="1,2,3", help="A prompt as token ids, which needs no tokenizer. Can be given several times.")
]


def read_prompts(texts: Sequence[str] | None, ids: Sequence[str] | None) -> list[Prompt]:
    """Return all prompts that were given, texts first.

    Parameters
    ----------
    texts, ids : sequence of str, or None
        Values of ``--prompt`` and of ``--prompt-ids``.

    Returns
    -------
    list of prompts
        At least one: the texts as str, then the token ids as lists of int.

    Raises
    ------
    typer.BadParameter
        There is none, a text is not UTF-8, or token ids are not integers: wrong usage.
    """
    prompts: list[Prompt] = [*(_text(text) for text in texts or ()), *(_token_ids(text) for text in ids or ())]
    if not prompts:
        raise typer.BadParameter("expected --prompt or --prompt-ids, got neither.")
    return prompts


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"expected UTF-8, got {text!r}.", param_hint="--prompt") from None
    return text


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise typer.BadParameter(f"expected integers such as 1,2,3, got {text!r}.", param_hint="--prompt-ids")
    return ids
