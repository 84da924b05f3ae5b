"""``--prompt`` and ``--prompt-ids``, of ``generate``, ``score`` and ``compare``."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trt_kvcache.cli.option_groups import WrongUsage
from trt_kvcache.generation.prompts import Prompt

Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT", help="A prompt; - reads it from stdin. Can be given several times.")
]
PromptIds = Annotated[
    list[str] | None, typer.Option(metavar="1,2,3", help="A prompt as token ids, which needs no tokenizer. Can be given several times.")
]


def read_prompts(texts: Sequence[str] | None, ids: Sequence[str] | None) -> list[Prompt]:
    """Return all given prompts, texts first. The text ``-`` is stdin without its last line feed."""
    if texts is not None and texts.count("-") > 1:
        raise WrongUsage("expected --prompt - once, as stdin can be read once.")
    prompts: list[Prompt] = [*(_text(text) for text in texts or ()), *(_token_ids(text) for text in ids or ())]
    if not prompts:
        raise WrongUsage("expected --prompt or --prompt-ids, got neither.")
    return prompts


def _text(text: str) -> str:
    if text == "-":
        return _stdin()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"expected UTF-8, got {text!r}.", param_hint="--prompt") from None
    return text


def _stdin() -> str:
    content = sys.stdin.buffer.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte 0x{content[error.start]:02x} at {error.start}"
        raise typer.BadParameter(f"expected UTF-8 on stdin, got {what}.", param_hint="--prompt") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise typer.BadParameter("expected text on stdin, got none.", param_hint="--prompt")
    return text


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise typer.BadParameter(f"expected integers such as 1,2,3, got {text!r}.", param_hint="--prompt-ids")
    return ids
