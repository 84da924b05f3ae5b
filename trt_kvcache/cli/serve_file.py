"""``trt-kvcache serve-file``: run the prompts of a file through a few slots, and write the answers to another file."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import count, messages, say
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.prompt_file import FilePrompt, read_prompt_file
from trt_kvcache.cli.sampling_flags import IgnoreEos, MaxNewTokens, MinP, SamplingFlags, Seed, Stop, Temperature, TopK, TopP
from trt_kvcache.cli.session_notes import Statistics, note_statistics
from trt_kvcache.errors import KVCacheError
from trt_kvcache.generation.sampling import with_options
from trt_kvcache.session.request_handle import RequestHandle
from trt_kvcache.session.session import InferenceSession

_MAX_SLOTS = 8


def serve_file(
    folder: session_flags.Folder,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help='A text file with one prompt per line; or .jsonl: a text, token ids, or {"prompt": ..., "max_new_tokens": ...} per line.',
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="The file to write. An existing one is replaced.")],
    prompt_cache: Annotated[
        int,
        typer.Option(
            min=0, metavar="MIB", help="Memory for copies of prompts, in MiB: what prompts have in common at their start is then run once."
        ),
    ] = 0,
    statistics: Statistics = True,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    engine: session_flags.EngineOption = "auto",
    flavour: session_flags.FlavourOption = "auto",
    cuda_graphs: session_flags.CudaGraphs = True,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="SLOTS", help=f"Slots of the cache, for a model folder. Default: one per prompt, at most {_MAX_SLOTS}."
        ),
    ] = None,
    max_sequence_length: session_flags.MaxSequenceLength = None,
    dtype: session_flags.DTypeOption = None,
    attention: session_flags.AttentionOption = None,
) -> None:
    """Continue all prompts of a file. As one ends, the next takes its slot.

    Each answer is written when it ends, with the index of its prompt.
    """
    options = SamplingFlags(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    ).options()
    wanted = read_prompt_file(prompts)
    if output.exists() and output.samefile(prompts):
        raise typer.BadParameter(f"expected another file than the prompts, got {output}.", param_hint="--output")
    flags = session_flags.SessionFlags(
        folder=folder,
        engine=engine,
        flavour=flavour,
        cuda_graphs=cuda_graphs,
        prompt_cache_bytes=prompt_cache << 20,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        attention=attention,
    )
    with session_flags.open_session(flags.source(slots=min(len(wanted), _MAX_SLOTS))) as session:
        left = [_submit(session, prompt, options) for prompt in wanted]
        with output.open("w", encoding="utf-8") as file:
            try:
                with _progress(len(left)) as show:
                    _serve(session, left, file, show)
            finally:
                say(f"{output}: {len(wanted) - len(left)} of {count(len(wanted), 'answer')}")
        if statistics:
            note_statistics(session)


def _submit(session: InferenceSession, prompt: FilePrompt, options: dict[str, Any]) -> RequestHandle:
    try:
        return session.submit(prompt.prompt, with_options(session.defaults, {**options, **prompt.options}))
    except KVCacheError as error:
        raise type(error)(f"{prompt.place}: {error}") from None


def _serve(session: InferenceSession, left: list[RequestHandle], file: TextIO, show: Callable[[int, int], None]) -> None:
    """Run until all requests have ended. Those that have ended are written even if the run fails."""
    total, tokens = len(left), 0
    try:
        while moved := session.step():
            tokens += sum(handle.state != "prefilling" for handle in moved)
            _write(left, moved, file)
            show(total - len(left), tokens)
    finally:
        _write(left, list(left), file)


def _write(left: list[RequestHandle], handles: Iterable[RequestHandle], file: TextIO) -> None:
    ended = [handle for handle in handles if handle.finished]
    with held_interrupts():
        for handle in ended:
            answer = {"index": handle.index, "text": handle.text, "tokens": handle.tokens, "finish_reason": handle.finish_reason}
            file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            left.remove(handle)
        if ended:
            file.flush()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, int], None]]:
    console = messages()
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("prompts", total=total, tokens=0)
        yield lambda done, tokens: bars.update(task, completed=done, tokens=tokens)
