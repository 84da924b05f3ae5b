"""``trt-kvcache score``: log-probabilities and perplexity of texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import as_json, count, put_json, results, say, table
from trt_kvcache.cli.option_groups import Json
from trt_kvcache.cli.prompt_file import FilePrompt, read_prompt_file
from trt_kvcache.cli.prompt_flags import PromptIds, Prompts, read_prompts
from trt_kvcache.cli.session_notes import Statistics, note_statistics, session_document
from trt_kvcache.generation.chat_prompt import ChatPrompt
from trt_kvcache.generation.prompt_score import PromptScore, perplexity
from trt_kvcache.generation.prompts import AnyPrompt

#: Characters of a text in the table of texts.
_SHOWN = 60


def score(
    folder: session_flags.Folder,
    flags: Annotated[session_flags.ScoringFlags, session_flags.SLOTS_FOR_MANY],
    texts: Annotated[
        Path | None,
        typer.Argument(
            metavar="TEXTS",
            help='A text file with one text per line. In a .jsonl file each line is a text, token ids, or an object with "prompt" or '
            '"messages". - is stdin.',
        ),
    ] = None,
    prompt: Prompts = None,
    prompt_ids: PromptIds = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print a table of the tokens of each text.")] = False,
    top: Annotated[
        int, typer.Option(min=0, metavar="N", help="Also the N most likely tokens at each position, in --json and the tables of --tokens.")
    ] = 0,
    json: Json = False,
    statistics: Statistics = True,
) -> None:
    """Print log-probabilities and perplexity of texts.

    Texts are scored as they are, without the chat template. --tokens prints each token. An engine folder for TensorRT must be built with
    --max-logits-per-slot.
    """
    if top and not (tokens or json):
        raise typer.BadParameter("expected --tokens or --json with it, which show them.", param_hint="--top")
    given = _given(texts, prompt, prompt_ids)
    source = flags.source(session_flags.located(folder), slots=min(len(given), session_flags.MAX_SLOTS))
    with session_flags.open_session(source) as session:
        scores = session.score(given, top_logprobs=top, adapter=flags.request_adapter)
        if json:
            documents = [_document(index, *pair) for index, pair in enumerate(zip(given, scores, strict=True))]
            put_json({"texts": documents, **_total(scores), **session_document(session)})
        else:
            if tokens:
                _print_tokens(scores, session.tokenizer)
            _print_texts(scores, session.tokenizer)
        if statistics:
            note_statistics(session)


def _given(texts: Path | None, prompt: Sequence[str] | None, prompt_ids: Sequence[str] | None) -> list[AnyPrompt]:
    """Return the texts of a file, or of the command line."""
    if texts is None:
        if not (prompt or prompt_ids):
            raise typer.BadParameter("expected a file of texts, --prompt or --prompt-ids, got none of them.", param_hint="TEXTS")
        return [*read_prompts(prompt, prompt_ids)]
    if prompt or prompt_ids:
        raise typer.BadParameter("expected a file or --prompt, got both.", param_hint="TEXTS")
    return [_of_file(one) for one in read_prompt_file(texts)]


def _of_file(given: FilePrompt) -> AnyPrompt:
    return given.prompt if given.messages is None else ChatPrompt(given.messages, add_generation_prompt=False)


def _document(index: int, given: AnyPrompt, found: PromptScore) -> dict[str, Any]:
    """Return the JSON object of a text."""
    shown = given.messages if isinstance(given, ChatPrompt) else given
    top = {} if found.top_logprobs is None else {"top_logprobs": as_json(found.top_logprobs)}
    values = {"logprobs": found.logprobs, "logprob": found.logprob, "perplexity": found.perplexity}
    return {"index": index, "prompt": as_json(shown), "tokens": [*found.tokens], **as_json(values), **top}


def _total(scores: Sequence[PromptScore]) -> dict[str, Any]:
    return {"num_scored": sum(one.num_scored for one in scores), "perplexity": as_json(perplexity(scores))}


def _print_texts(scores: Sequence[PromptScore], tokenizer: Tokenizer | None) -> None:
    """Print a table of the texts, and the perplexity of all."""
    numbers = ("text", "tokens", "log-probability", "perplexity")
    rows = table(*numbers, "begins", numbers=numbers)
    for index, one in enumerate(scores):
        begins = _text(one.tokens[:_SHOWN], tokenizer)[:_SHOWN]
        rows.add_row(str(index), str(len(one.tokens)), f"{one.logprob:.3f}", f"{one.perplexity:.3f}", begins)
    results().print(rows)
    scored, texts = (count(number, what) for number, what in ((sum(one.num_scored for one in scores), "token"), (len(scores), "text")))
    say(f"perplexity {perplexity(scores):.3f} over {scored} of {texts}; the first token of a text is not scored")


def _print_tokens(scores: Sequence[PromptScore], tokenizer: Tokenizer | None) -> None:
    """Print a table of the tokens of each text."""
    for index, one in enumerate(scores):
        most_likely = ["most likely"] if one.top_logprobs is not None else []
        rows = table(
            "place", "token", "text", "log-probability", *most_likely, numbers=("place", "token", "log-probability"), title=f"Text {index}"
        )
        for place, (token, value) in enumerate(zip(one.tokens, one.logprobs, strict=True)):
            top = [] if one.top_logprobs is None else [_top(one.top_logprobs[place] or (), tokenizer)]
            rows.add_row(str(place), str(token), _quoted(token, tokenizer), "" if value is None else f"{value:.4f}", *top)
        results().print(rows)


def _top(pairs: Sequence[tuple[int, float]], tokenizer: Tokenizer | None) -> str:
    return ", ".join(f"{_quoted(token, tokenizer) or token} {value:.4f}" for token, value in pairs)


def _text(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else " ".join(tokenizer.decode(tokens).split())


def _quoted(token: int, tokenizer: Tokenizer | None) -> str:
    """Return the text of a token in quotation marks, which show spaces; empty without a tokenizer."""
    return "" if tokenizer is None else repr(tokenizer.decode([token], skip_special_tokens=False))
