"""``trt-kvcache doctor``: check a GPU, its driver and TensorRT."""

from pathlib import Path
from typing import Annotated

import typer

from trt_kvcache.cli.option_groups import choice
from trt_kvcache.cli.session_flags import FlavourName
from trt_kvcache.doctor.catalog import BY_LETTER, CHECKS, Check
from trt_kvcache.doctor.run import run_doctor, say_on_stdout


def doctor(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help="A Hugging Face folder to check too.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the report there as JSON, and beside it as Markdown.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Also checks that take minutes.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Without a GPU: host memory and NumPy in the place of GPU and TensorRT.")
    ] = False,
    checks: Annotated[
        str, typer.Option("--checks", metavar="LETTERS", help="Only A and these checks, such as BF. Then no verdict is kept.")
    ] = "",
    flavour: Annotated[FlavourName, choice(FlavourName, "--flavour", help="Which TensorRT is checked.")] = "auto",
    device: Annotated[int, typer.Option("--device", min=0, metavar="N", help="Index of the GPU.")] = 0,
) -> None:
    """Check a GPU, its driver and TensorRT.

    Eleven checks, each in a child process with a time limit, with a line for each and a text to paste: environment, kernels, engines,
    TensorRT's cache and attention layers, sessions, CUDA graphs, compilation, time, memory, tokens. It works on GPUs that TensorRT refuses
    too. Exit codes: 0 passed, 1 a check failed, 2 no GPU.
    """
    raise typer.Exit(
        run_doctor(
            model=model,
            full=full,
            dry_run=dry_run,
            flavour=flavour,
            device=device,
            output=output,
            say=say_on_stdout,
            checks=_chosen(checks),
        )
    )


def _chosen(letters: str) -> tuple[Check, ...]:
    if set(letters) - set(BY_LETTER):
        raise typer.BadParameter(f"expected letters of {''.join(BY_LETTER)}, got {letters!r}.", param_hint="--checks")
    return tuple(check for check in CHECKS if check.letter in letters) if letters else CHECKS
