"""``trt-kvcache generate``: continue prompts, or sequences from snapshots."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli import session_flags
from trt_kvcache.cli.console import put
from trt_kvcache.cli.prompt_flags import PromptIds, Prompts, read_prompts
from trt_kvcache.cli.sampling_flags import IgnoreEos, MaxNewTokens, MinP, SamplingFlags, Seed, Stop, Temperature, TopK, TopP
from trt_kvcache.cli.session_notes import Statistics, note_statistics, warn_of_full_cache
from trt_kvcache.errors import ConfigError
from trt_kvcache.generation.prompts import Prompt
from trt_kvcache.generation.request import GeneratedToken
from trt_kvcache.session.session import InferenceSession


def generate(
    folder: session_flags.Folder,
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
    max_batch_size: session_flags.MaxBatchSize = None,
    max_sequence_length: session_flags.MaxSequenceLength = None,
    dtype: session_flags.DTypeOption = None,
    attention: session_flags.AttentionOption = None,
) -> None:
    """Continue prompts. The text of one prompt is printed as it is generated, that of several at the end, one after another."""
    if resume and (prompt or prompt_ids):
        raise ConfigError("generate: expected prompts or --resume, got both.")
    prompts = [] if resume else read_prompts(prompt, prompt_ids)
    count = len(resume or prompts)
    if save_snapshot is not None and count != 1:
        raise ConfigError(f"--save-snapshot: expected one prompt, got {count}.")
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
    flags = session_flags.SessionFlags(
        folder=folder,
        engine=engine,
        flavour=flavour,
        cuda_graphs=cuda_graphs,
        max_batch_size=max_batch_size,
        max_sequence_length=max_sequence_length,
        dtype=dtype,
        attention=attention,
    )
    with session_flags.open_session(flags.source(slots=count)) as session:
        events = session.resume(resume, **options) if resume else session.generate(prompts, **options)
        starts = prompts or [""] * count
        if count == 1:
            _write_as_it_comes(session, starts[0], events)
        else:
            _write_one_after_another(session, starts, events)
        if save_snapshot is not None:
            session.save_snapshot(save_snapshot)
        warn_of_full_cache(session)
        if statistics:
            note_statistics(session)


def _write_as_it_comes(session: InferenceSession, prompt: Prompt, events: Iterable[GeneratedToken]) -> None:
    put(_as_text(prompt))
    try:
        for event in events:
            put(_piece(session, event))
    finally:
        put("\n")


def _write_one_after_another(session: InferenceSession, prompts: Sequence[Prompt], events: Iterable[GeneratedToken]) -> None:
    texts = [_as_text(prompt) for prompt in prompts]
    try:
        for event in events:
            texts[event.index] += _piece(session, event)
    finally:
        for index, text in enumerate(texts):
            put(f"[{index}] {text}\n")


def _as_text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def _piece(session: InferenceSession, event: GeneratedToken) -> str:
    return event.text if session.tokenizer is not None else f" {event.token}"
