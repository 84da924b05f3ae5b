"""``trt-kvcache bench``: measure the speed of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.benchmarking import BenchmarkCase, BenchmarkRow, MemoryLimit, describe_environment, measure
from trt_kvcache.benchmarking.cases import check_cases
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.cli import session_flags
from trt_kvcache.cli.bench_report import BenchReport
from trt_kvcache.cli.console import progress_display, put, put_json
from trt_kvcache.cli.option_groups import Changed, Json, WrongUsage
from trt_kvcache.cli.session_flags import SessionFlags
from trt_kvcache.engine_folder.folder import EngineFolder, is_engine_folder
from trt_kvcache.errors import CapacityError, KVCacheError, RangeError
from trt_kvcache.generation.sampling import SamplingParams
from trt_kvcache.model import ModelConfig

_PANEL = "Cases"


@dataclass(frozen=True, kw_only=True)
class CaseFlags:
    """Options that select the cases, as lists with commas."""

    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", "-p", metavar="N,...", help="Lengths of prompts; 0 for none.", rich_help_panel=_PANEL)
    ] = "512"
    generate_tokens: Annotated[
        str, typer.Option("--generate-tokens", "-n", metavar="N,...", help="Decode steps; 0 for none.", rich_help_panel=_PANEL)
    ] = "128"
    prompt_and_generate: Annotated[
        str | None,
        typer.Option("--pg", metavar="P+N,...", help="Also a prompt with decode steps, such as 512+128.", rich_help_panel=_PANEL),
    ] = None
    batch_size: Annotated[
        str, typer.Option("--batch-size", "-b", metavar="N,...", help="Numbers of slots that run together.", rich_help_panel=_PANEL)
    ] = "1"
    depth: Annotated[
        str,
        typer.Option("--depth", "-d", metavar="N,...", help="Tokens in each slot before the measurement.", rich_help_panel=_PANEL),
    ] = "0"

    def cases(self) -> list[BenchmarkCase]:
        """Return the cases: for each batch size and depth, the prompts, the decode steps, and both together."""
        pairs = [(prompt, 0) for prompt in _numbers("--prompt-tokens", self.prompt_tokens) if prompt]
        pairs += [(0, steps) for steps in _numbers("--generate-tokens", self.generate_tokens) if steps]
        pairs += _pairs("--pg", self.prompt_and_generate or "")
        if not pairs:
            raise WrongUsage("expected something to measure: a number above 0 for --prompt-tokens or --generate-tokens, or --pg.")
        places = product(_numbers("--batch-size", self.batch_size, least=1), _numbers("--depth", self.depth), pairs)
        return [
            BenchmarkCase(prompt_tokens=prompt, generate_tokens=steps, batch_size=batch, depth=depth)
            for batch, depth, (prompt, steps) in places
        ]


def bench(
    folder: session_flags.Folder,
    case_flags: CaseFlags,
    flags: Annotated[
        SessionFlags,
        Changed("max_batch_size", help="Slots of the cache. Default: the largest --batch-size."),
        Changed("max_sequence_length", help="Tokens that a slot can hold. Default: as needed by the longest case."),
    ],
    draft: session_flags.DraftOption = None,
    draft_tree: session_flags.DraftTreeOption = None,
    runs: Annotated[int, typer.Option("--runs", "-r", min=1, metavar="N", help="Timed runs of each case.")] = 5,
    warmup: Annotated[
        int, typer.Option(min=0, metavar="N", help="Runs of each case before the timed ones. PyTorch captures CUDA graphs in the second.")
    ] = 2,
    temperature: Annotated[float, typer.Option(metavar="X", help="0: greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="With a temperature: top-p (nucleus) sampling.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the random prompts and of sampling.")] = 0,
    json: Json = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print one line of CSV for each row on stdout; everything else goes to stderr.")
    ] = False,
) -> None:
    """Measure the speed of a model.

    Each row is a prompt (pp512), decode steps (tg128) or both, with the names of llama-bench. Prompts are random tokens. The time includes
    sampling and decoding tokens to text. Lists of numbers have commas: -p 512,2048 -b 1,8.
    """
    if json and csv:
        raise WrongUsage("expected --json or --csv, got both.")
    cases = case_flags.cases()
    params = _sampling(temperature, top_p, seed)
    place = session_flags.located(folder)
    model, dtype, flags = _fitted(place, flags, cases)
    source = flags.source(place, slots=max(case.batch_size for case in cases)).replace(draft=draft, draft_tree=draft_tree)
    with session_flags.open_session(source) as session:
        environment = describe_environment(session)
        rows: list[BenchmarkRow] = []
        try:
            with progress_display() as show:
                measured = measure(
                    session,
                    cases,
                    runs=runs,
                    warmup=warmup,
                    seed=seed,
                    params=params,
                    adapter=flags.request_adapter,
                    on_run=lambda case, done, total: show(f"{case.name}, batch {case.batch_size}", done / total),
                )
                for row in measured:
                    rows.append(row)
            stopped = None
        except (KeyboardInterrupt, KVCacheError) as error:
            if not rows and isinstance(error, KVCacheError):
                raise
            stopped = error
        report = BenchReport(
            model=model,
            folder=folder,
            dtype=dtype,
            limit=MemoryLimit.measured(  # after the rows: it would add to their memory
                model,
                dtype,
                session.cache.memory,
                session.weights,
                adapters_nbytes=0 if flags.request_adapter is None else session.adapters_nbytes,
            ),
            weights_format=dtype if session.weights is None or not session.weights.is_quantized else session.weights.format,
            environment=environment,
            params=params,
            seed=seed,
            makes_text=session.tokenizer is not None,
        )
        if json:
            put_json(report.document(rows, interrupted=stopped is not None))
        elif csv:
            put(report.csv(rows))
        elif rows:
            report.print(rows)
        if stopped is not None:
            raise stopped


def _sampling(temperature: float, top_p: float | None, seed: int) -> SamplingParams:
    if top_p is not None and temperature == 0:
        raise typer.BadParameter("expected --temperature above 0 with it, which draws tokens.", param_hint="--top-p")
    try:
        return SamplingParams(temperature=temperature, top_p=1.0 if top_p is None else top_p, seed=seed)
    except RangeError as error:
        name, _, text = str(error).removeprefix("SamplingParams.").partition(": ")
        raise typer.BadParameter(text, param_hint=f"--{name.replace('_', '-')}") from None


def _fitted(place: Path, flags: SessionFlags, cases: Sequence[BenchmarkCase]) -> tuple[ModelConfig, str, SessionFlags]:
    """Return model, dtype and flags with sizes for all cases; wrong usage if they cannot fit."""
    if is_engine_folder(place):
        config = EngineFolder.open(place).config
        built = "The engine was built for it."
        _check(cases, config.cache.max_batch_size, config.cache.max_sequence_length, built, built)
        return config.model, config.dtype, flags
    model = Checkpoint.read_config(place)
    slots = flags.max_batch_size or max(case.batch_size for case in cases)
    length = flags.max_sequence_length or min(max(case.tokens_per_slot for case in cases), model.max_position_embeddings)
    why = "--max-sequence-length says so." if flags.max_sequence_length else "The model has no more positions."
    _check(cases, slots, length, "--max-batch-size says so.", why)
    return model, flags.dtype or model.dtype, replace(flags, max_batch_size=slots, max_sequence_length=length)


def _check(cases: Sequence[BenchmarkCase], slots: int, length: int, why_slots: str, why_length: str) -> None:
    try:
        check_cases(cases, max_batch_size=slots, max_sequence_length=length)
    except CapacityError as error:
        if any(case.batch_size > slots for case in cases):
            raise typer.BadParameter(f"{error} {why_slots}", param_hint="--batch-size") from None
        lengths = "--prompt-tokens, --generate-tokens, --pg, --depth"
        raise typer.BadParameter(f"{error} {why_length}", param_hint=lengths) from None


def _numbers(flag: str, text: str, *, least: int = 0) -> list[int]:
    """Parse a list with commas, without duplicates."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise typer.BadParameter(f"expected numbers of at least {least} with commas between them, got {text!r}.", param_hint=flag)
    return list(dict.fromkeys(int(part) for part in parts))


def _pairs(flag: str, text: str) -> list[tuple[int, int]]:
    """Parse pairs such as ``512+128,512+256``."""
    pairs = []
    for part in text.split(",") if text else ():
        prompt, _, steps = (side.strip() for side in part.partition("+"))
        if not (prompt.isdecimal() and steps.isdecimal() and int(prompt) and int(steps)):
            raise typer.BadParameter(f"expected pairs such as 512+128 with commas between them, got {text!r}.", param_hint=flag)
        pairs.append((int(prompt), int(steps)))
    return list(dict.fromkeys(pairs))
