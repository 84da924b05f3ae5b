"""``--prompt`` and ``--prompt-ids``, which ``generate`` and ``compare`` share."""

from collections.abc import Sequence
from typing import Annotated

import typer

from trt_kvcache.generation.prompts import Prompt

Prompts = Annotated[list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; may be repeated.")]
PromptIds = Annotated[
    list[str] | None, typer.Option(metavar="1,2,3", help="A prompt as token ids, also for a model without a tokenizer; may be repeated.")
]


def read_prompts(texts: Sequence[str] | None, ids: Sequence[str] | None) -> list[Prompt]:
    """Return all prompts that were given, texts first. Wrong usage if there are none, or if one is not what it should be."""
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
