"""``trt-kvcache perplexity``: the perplexity of a long text."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import as_json, count, progress_display, put_json, say
from trt_kvcache.cli.option_groups import Changed, Json
from trt_kvcache.cli.session_notes import Statistics, note_statistics, session_document
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.text_perplexity import text_perplexity


def perplexity(
    folder: session_flags.Folder,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file in UTF-8. - is stdin.")],
    flags: Annotated[session_flags.ScoringFlags, Changed("max_batch_size", help="Windows that run together. Default: 1.")],
    window: Annotated[
        int | None, typer.Option(min=2, metavar="TOKENS", help="Tokens of a window. Default: those of a slot (--max-sequence-length).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens between the beginnings of two windows. Default: half of a window.")
    ] = None,
    json: Json = False,
    statistics: Statistics = True,
) -> None:
    """Print the perplexity of a text.

    A text of any length runs in overlapping windows, and each token is scored once, in the first window that has it. Compare numbers only
    for the same tokens, window and stride: with and without --quantize, or of two checkpoints of a model. For TensorRT an engine folder
    must be built with --max-logits-per-slot.
    """
    given = _read(text)
    source = flags.source(session_flags.located(folder), slots=1)
    with session_flags.open_session(source) as session:
        with progress_display() as show:
            found = text_perplexity(
                session,
                given,
                window=window,
                stride=stride,
                adapter=flags.request_adapter,
                progress=lambda done, total: show("score windows", done / total),
            )
        if json:
            weights = None if session.weights is None else session.weights.format
            put_json({**as_json(found), "perplexity": as_json(found.perplexity), "weights_format": weights, **session_document(session)})
        else:
            windows = f"{count(found.num_windows, 'window')} of {found.window} tokens, stride {found.stride}"
            say(f"perplexity {found.perplexity:.4f} over {found.num_scored} of {count(found.num_tokens, 'token')} in {windows}")
        if statistics:
            note_statistics(session)


def _read(path: Path) -> str:
    """Return the text of a file, or of stdin."""
    content = sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected text in UTF-8, got byte 0x{content[error.start]:02x} at {error.start}.") from None
