"""``trt-kvcache serve-file``: run the prompts of a file in a few slots, and write the answers to another file."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trt_kvcache._util.checks import similar_option
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.answer_file import AnswerFile
from trt_kvcache.cli.chat_flags import ChatFlags, Template
from trt_kvcache.cli.console import count, messages, note, warn
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.prompt_file import OPTION_FIELDS, FilePrompt, read_prompt_file
from trt_kvcache.cli.sampling_flags import Logprobs, SamplingFlags, note_unused, with_drawn_seed
from trt_kvcache.cli.session_flags import SessionFlags
from trt_kvcache.cli.session_notes import Statistics, logprobs_document, note_statistics
from trt_kvcache.cli.verbosity import is_quiet
from trt_kvcache.errors import ConfigError, KVCacheError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.generation.sampling import OTHER_NAMES, with_options
from trt_kvcache.plot import check_can_draw
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.session import InferenceSession


def serve_file(
    folder: session_flags.Folder,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help="A text file with one prompt per line. In a .jsonl file each line is a text, token ids, or an object with "
            '"prompt" or "messages", sampling options, and fields that come back with the answer, of which "adapter" names one of '
            "--adapters. - is stdin.",
        ),
    ],
    chat_flags: ChatFlags,
    sampling: SamplingFlags,
    flags: Annotated[SessionFlags, session_flags.SLOTS_FOR_MANY],
    draft: session_flags.DraftOption = None,
    draft_tree: session_flags.DraftTreeOption = None,
    logprobs: Logprobs = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="The file to write. - is stdout.")] = Path("-"),
    continued: Annotated[bool, typer.Option("--continue", help="Keep the answers in OUT.jsonl, and append the missing ones.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the answers in OUT.jsonl.")] = False,
    prompt_cache: Annotated[
        int,
        typer.Option(min=0, metavar="MIB", help="Memory of the prefix cache, in MiB: a common prefix of prompts then runs once."),
    ] = 0,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the work of each slot over time into this file: .svg, .png or .pdf."),
    ] = None,
    statistics: Statistics = True,
) -> None:
    """Answer or continue all prompts of a file.

    A free slot takes the next prompt. Each answer is written when it ends, with the index of its prompt. A model with a chat template
    answers; without one, or with --raw, it continues the text.
    """
    options = sampling.options(logprobs)
    wanted = read_prompt_file(prompts)
    _warn_of_misspelt_options(wanted)
    if output.exists() and prompts.exists() and output.samefile(prompts):
        raise typer.BadParameter(f"expected another file than the prompts, got {output}.", param_hint="--output")
    if timeline is not None:
        check_can_draw(timeline)
    answers = AnswerFile(output, continued=continued, overwrite=overwrite)
    answers.check(prompts, wanted)
    missing = {index: prompt for index, prompt in enumerate(wanted) if index not in answers.finished}
    if not missing:
        note(f"{answers}: {count(len(wanted), 'answer')}, all there")
        return
    source = flags.source(
        session_flags.located(folder), slots=min(len(missing), session_flags.MAX_SLOTS), prompt_cache_bytes=prompt_cache << 20
    )
    with session_flags.open_session(source.replace(draft=draft, draft_tree=draft_tree)) as session:
        if not any(prompt.options.get("temperature") for prompt in missing.values()):
            note_unused(options, session.defaults)
        recording = None if timeline is None else session.record()
        template = chat_flags.template(session.tokenizer)
        left = dict(_submit(session, _Task(index, prompt), template, options, flags.request_adapter) for index, prompt in missing.items())
        with answers.open() as file:
            try:
                with _progress(len(left)) as show:
                    _serve(session, left, file, show)
            finally:
                note(f"{answers}: {len(wanted) - len(left)} of {count(len(wanted), 'answer')}")
                if recording is not None and timeline is not None:
                    note(f"{recording.plot(title=str(prompts)).save(timeline)}: the work of each slot")
        if statistics:
            note_statistics(session)


def _warn_of_misspelt_options(prompts: Iterable[FilePrompt]) -> None:
    """Warn of fields whose name is similar to an option, once for each name."""
    seen: set[str] = set()
    for prompt in prompts:
        for name in prompt.metadata.keys() - seen:
            seen.add(name)
            meant = similar_option(name, OPTION_FIELDS, OTHER_NAMES, cutoff=0.85)
            if meant is not None:
                warn(f"{prompt.place}: {name}: no sampling option ({meant} is one); it is repeated in the answer.")


@dataclass(frozen=True)
class _Task:
    """A prompt of the file, its index, and the seed of its answer (None if greedy)."""

    index: int
    prompt: FilePrompt
    seed: int | None = None

    def answer(self, handle: RequestHandle) -> dict[str, Any]:
        """Return the line of the answer."""
        answer = {"index": self.index, "text": handle.text, "tokens": handle.tokens, "finish_reason": handle.finish_reason}
        seed = {} if self.seed is None else {"seed": self.seed}
        return {**self.prompt.metadata, **answer, **seed, **logprobs_document(handle.events)}


def _submit(
    session: InferenceSession, task: _Task, template: Template | None, options: dict[str, Any], adapter: str | None
) -> tuple[RequestHandle, _Task]:
    """Submit a prompt, with the adapter of its line if it names one, else with ``adapter``."""
    prompt = task.prompt
    if session.adapters:
        adapter = prompt.metadata.get("adapter", adapter)
    try:
        params = with_drawn_seed(with_options(session.defaults, {**options, **prompt.options}))
        handle = session.submit(_prompt(prompt, template), params, adapter=adapter)
    except KVCacheError as error:
        raise type(error)(f"{prompt.place}: {error}") from None
    return handle, replace(task, seed=params.seed if params.temperature > 0 else None)


def _prompt(prompt: FilePrompt, template: Template | None) -> Prompt:
    if prompt.messages is None:
        return prompt.prompt if template is None else template.prompt(prompt.prompt)
    if template is None:
        raise ConfigError("messages: expected a model with a chat template, and no --raw.")
    return template.tokens(prompt.messages)


def _serve(session: InferenceSession, left: dict[RequestHandle, _Task], file: TextIO, show: Callable[[int, int], None]) -> None:
    """Run until all requests have ended. Ended requests are written even if the run fails."""
    total, tokens = len(left), 0
    try:
        while moved := session.step():
            tokens += sum(handle.state != "prefilling" for handle in moved)
            _write(left, moved, file)
            show(total - len(left), tokens)
    finally:
        _write(left, list(left), file)


def _write(left: dict[RequestHandle, _Task], handles: Iterable[RequestHandle], file: TextIO) -> None:
    ended = [handle for handle in handles if handle.finished]
    with held_interrupts():
        for handle in ended:
            file.write(json.dumps(left.pop(handle).answer(handle), ensure_ascii=False) + "\n")
        if ended:
            file.flush()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    console = messages()
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=is_quiet() or not console.is_terminal) as bars:
        task = bars.add_task("prompts", total=total, tokens=0)
        yield lambda done, tokens: bars.update(task, completed=done, tokens=tokens)
