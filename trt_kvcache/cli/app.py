"""The command line: its commands, and the report of errors."""

import contextlib
import functools
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import typer

from trt_kvcache import __version__
from trt_kvcache.cli import FAILED, INTERRUPTED
from trt_kvcache.cli.bench import bench
from trt_kvcache.cli.build import build
from trt_kvcache.cli.chat import chat
from trt_kvcache.cli.compare import compare
from trt_kvcache.cli.console import complain, message_of, warn
from trt_kvcache.cli.doctor import doctor
from trt_kvcache.cli.flag_names import flags_of, naming_flags
from trt_kvcache.cli.generate import generate
from trt_kvcache.cli.help import Command, Commands
from trt_kvcache.cli.inspect import inspect as inspect_command
from trt_kvcache.cli.memory import memory
from trt_kvcache.cli.option_groups import call_with_flat, flat_parameters
from trt_kvcache.cli.perplexity import perplexity
from trt_kvcache.cli.score import score
from trt_kvcache.cli.serve import serve
from trt_kvcache.cli.serve_file import serve_file
from trt_kvcache.cli.verbosity import SHARED_OPTIONS, chosen_verbosity
from trt_kvcache.errors import KVCacheError
from trt_kvcache.session.open_model import EngineFallbackWarning

NAME = "trt-kvcache"

app = typer.Typer(
    name=NAME,
    cls=Commands,
    help="The KV cache layer for TensorRT: build engines from Hugging Face folders, run them, compare them.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 compare found a difference, 130 Ctrl-C.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _with_clear_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all commands; report errors as one message and an exit code, without a traceback."""
    # Errors of other commands may name options of build.
    flags = {name: flag for one in (build, command) for name, flag in flags_of(flat_parameters(one)).items()}

    @functools.wraps(command)
    def run_command(*, quiet: bool, verbose: int, **options: Any) -> None:
        with naming_flags(flags):
            run_with_clear_errors(quiet=quiet, verbose=verbose, **options)

    def run_with_clear_errors(*, quiet: bool, verbose: int, **options: Any) -> None:
        try:
            with chosen_verbosity(quiet=quiet, verbose=verbose):
                call_with_flat(command, options)
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # stdout was closed: typer ends the command without a message
        except (KVCacheError, OSError) as error:
            complain("error:", message_of(error))
            raise typer.Exit(FAILED) from None
        except MemoryError as error:
            complain("error:", f"out of memory. {error}")
            raise typer.Exit(FAILED) from None

    shared = [Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind) for name, default, kind in SHARED_OPTIONS]
    parameters = [*flat_parameters(command), *shared]
    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run_command


COMMANDS = (build, generate, chat, serve, serve_file, score, perplexity, compare, bench, memory, inspect_command, doctor)

for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"), cls=Command)(_with_clear_errors(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def options(version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True)) -> None:
    """Handle the options before the command."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    _prepare_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("always", EngineFallbackWarning)
        warnings.showwarning = _show_warning
        try:
            app(args=None if arguments is None else list(arguments), prog_name=NAME)
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else FAILED
    return 0


def _show_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    warn(str(message))


def _prepare_streams() -> None:
    """Replace closed streams by empty ones, and have streams replace characters that they cannot encode."""
    for name, mode, handler in (("stdin", "r", "replace"), ("stdout", "w", "replace"), ("stderr", "w", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # something was read from it already
                stream.reconfigure(errors=handler)
