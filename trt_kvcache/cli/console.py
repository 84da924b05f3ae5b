"""Output of the command line: results, JSON, messages, progress bars, tables, sizes."""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trt_kvcache.builder.build_engine import BUILDING, Progress as ProgressCallback
from trt_kvcache.cli.flag_names import in_flags
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.verbosity import is_quiet
from trt_kvcache.memory.shapes import MAX_DIMENSION
from trt_kvcache.model import ModelConfig

_WIDTH_OF_A_PIPE = 160


def results() -> Console:
    """Return the console for results, on stdout. Texts have no markup."""
    return _console(stderr=False)


def messages() -> Console:
    """Return the console for everything else, on stderr: progress, statistics, errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if terminal else _WIDTH_OF_A_PIPE, markup=False, emoji=False, highlight=False)


def say(line: str, style: str = "") -> None:
    """Print a line of the result."""
    _print(results(), Text(line, style))


def put_json(document: object) -> None:
    """Print the one JSON document of a command with ``--json``."""
    put(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def as_json(value: Any) -> Any:
    """Return a value of this package in the types of JSON. NaN and infinity become null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, ModelConfig):
        return value.to_description()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def put(text: str) -> None:
    """Write generated text without changes, and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a note on stderr, unless ``--quiet``."""
    if not is_quiet():
        _print(messages(), Text(text, "dim"))


def warn(text: str) -> None:
    """Print a warning on stderr, unless ``--quiet``."""
    if not is_quiet():
        _print(messages(), Text.assemble(("warning:", "yellow"), " ", in_flags(text)))


def complain(head: str, text: str = "") -> None:
    """Print the error of a command on stderr."""
    _print(messages(), Text.assemble((head, "red"), f" {in_flags(text)}" if text else ""))


def message_of(error: Exception) -> str:
    """Return the message of an error, without its errno."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.strerror}." if error.filename is None else f"{error.filename}: {error.strerror}."


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Show progress bars of work in this process, if stderr is a terminal. TensorRT defers Ctrl-C to its next report."""
    with held_interrupts() as interrupts, progress_display() as show:

        def report(stage: str, done: float | None) -> None:
            interrupts.check()
            interrupts.hold = stage == BUILDING and done != 1.0
            show(stage, done)

        yield report


@contextmanager
def progress_display() -> Iterator[ProgressCallback]:
    """Show progress bars of long work, if stderr is a terminal. Ctrl-C is not changed."""
    console = messages()
    if is_quiet() or not console.is_terminal:
        yield _ignore
        return
    # The spinner shows activity: one step of TensorRT may take half a minute.
    columns = (SpinnerColumn("line"), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: float | None) -> None:
            if stage not in tasks:
                for earlier in tasks.values():
                    bars.update(earlier, total=1.0, completed=1.0)
                tasks[stage] = bars.add_task(stage, total=None)
            if done is not None:
                bars.update(tasks[stage], total=1.0, completed=done)

        yield show


def _ignore(stage: str, done: float | None) -> None:
    pass


def table(*columns: str, numbers: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table with these columns; columns in ``numbers`` are right-aligned."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def size(nbytes: int) -> str:
    """Return a size in bytes for people: exact below 1 KiB, otherwise in KiB, MiB, GiB or TiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, what: str) -> str:
    """Return a number of things in words: ``1 slot``, ``2 slots``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def length_limit(tokens: int) -> str:
    """Return a length limit in words: ``96 tokens``, or ``any number of tokens`` for a cache of states only."""
    return "any number of tokens" if tokens == MAX_DIMENSION else count(tokens, "token")


def span(first: int, last: int) -> str:
    """Return a range in words: ``3``, or ``3-7``."""
    return str(first) if first == last else f"{first}-{last}"
