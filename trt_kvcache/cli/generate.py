"""``trt-kvcache generate``: continue prompts or answer them, or continue sequences from snapshots."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trt_kvcache._util.atomic_file import check_target
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.chat_flags import ChatFlags
from trt_kvcache.cli.console import put, put_json
from trt_kvcache.cli.option_groups import Json, WrongUsage
from trt_kvcache.cli.prompt_flags import PromptIds, Prompts, read_prompts
from trt_kvcache.cli.sampling_flags import Logprobs, SamplingFlags, note_unused, with_drawn_seed
from trt_kvcache.cli.session_flags import SessionFlags
from trt_kvcache.cli.session_notes import Statistics, logprobs_document, note_seeds, note_statistics, session_document, warn_of_full_cache
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.generation.sampling import with_options
from trt_kvcache.session.session import InferenceSession


def generate(
    folder: session_flags.Folder,
    chat_flags: ChatFlags,
    sampling: SamplingFlags,
    flags: SessionFlags,
    draft: session_flags.DraftOption = None,
    draft_tree: session_flags.DraftTreeOption = None,
    logprobs: Logprobs = None,
    prompt: Prompts = None,
    prompt_ids: PromptIds = None,
    resume: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Continue from a file of --save-snapshot, instead of a prompt. Can be given several times."),
    ] = None,
    save_snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the sequence to this file at the end, to continue it in another process. For one prompt only."
        ),
    ] = None,
    echo: Annotated[
        bool | None, typer.Option("--echo/--no-echo", help="Print the prompt before the text. Default: where the prompt is continued.")
    ] = None,
    json: Json = False,
    statistics: Statistics = True,
) -> None:
    """Answer or continue prompts.

    A model with a chat template answers; without one, or with --raw, it continues the text. The text of one prompt is printed as it is
    generated; texts of several prompts are printed at the end, one after another.
    """
    if resume and (prompt or prompt_ids):
        raise WrongUsage("expected prompts or --resume, got both.")
    given = [] if resume else read_prompts(prompt, prompt_ids)
    count = len(resume or given)
    if save_snapshot is not None and count != 1:
        raise typer.BadParameter(f"expected one prompt or --resume, got {count}.", param_hint="--save-snapshot")
    if logprobs is not None and not json:
        raise typer.BadParameter("expected --json with it, which prints them.", param_hint="--logprobs")
    if save_snapshot is not None:
        check_target(save_snapshot)
    options = sampling.options(logprobs)
    source = flags.source(session_flags.located(folder), slots=count).replace(draft=draft, draft_tree=draft_tree)
    with session_flags.open_session(source) as session:
        note_unused(options, session.defaults)
        template = chat_flags.template(session.tokenizer)
        answers = [_Answer(text, echo=template is None or not isinstance(text, str) if echo is None else echo) for text in given]
        if resume:
            answers = [_Answer("", echo=False) for _ in resume]
            events = session.resume(resume, **options)
        else:
            params = [with_drawn_seed(with_options(session.defaults, options)) for _ in given]
            for answer, chosen in zip(answers, params, strict=True):
                answer.seed = chosen.seed if chosen.temperature > 0 else None
            prompts = [text if template is None else template.prompt(text) for text in given]
            events = session.generate(prompts, params, adapter=flags.request_adapter)
        if json:
            _collect(answers, events)
        elif count == 1:
            _write_streaming(session, answers[0], events)
        else:
            _write_one_after_another(session, answers, events)
        if save_snapshot is not None:
            session.save_snapshot(save_snapshot)
        warn_of_full_cache(session)
        if statistics:
            note_seeds([answer.seed for answer in answers])
            note_statistics(session)
        if json:
            put_json({"answers": [answer.document(index) for index, answer in enumerate(answers)], **session_document(session)})


class _Answer:
    """The answer to one prompt, so far."""

    def __init__(self, prompt: Prompt, *, echo: bool) -> None:
        self.prompt = prompt
        self.head = (prompt if isinstance(prompt, str) else " ".join(map(str, prompt))) if echo else ""
        self.seed: int | None = None
        self.events: list[GeneratedToken] = []

    def document(self, index: int) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "index": index,
            "prompt": self.prompt,
            "text": "".join(event.text for event in self.events),
            "tokens": [event.token for event in self.events],
            "finish_reason": self.events[-1].finish_reason if self.events else None,
            "seed": self.seed,
            **logprobs_document(self.events),
        }


def _collect(answers: Sequence[_Answer], events: Iterable[GeneratedToken]) -> None:
    for event in events:
        answers[event.index].events.append(event)


def _write_streaming(session: InferenceSession, answer: _Answer, events: Iterable[GeneratedToken]) -> None:
    put(answer.head)
    try:
        for event in events:
            put(_piece(session, event))
    finally:
        put("\n")


def _write_one_after_another(session: InferenceSession, answers: Sequence[_Answer], events: Iterable[GeneratedToken]) -> None:
    texts = [answer.head for answer in answers]
    try:
        for event in events:
            texts[event.index] += _piece(session, event)
    finally:
        for index, text in enumerate(texts):
            put(f"[{index}] {text}\n")


def _piece(session: InferenceSession, event: GeneratedToken) -> str:
    return event.text if session.tokenizer is not None else f" {event.token}"
