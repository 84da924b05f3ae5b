"""Output of the command line: results and messages, progress bars, tables, sizes."""

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trt_kvcache._util.progress import Progress as ProgressCallback
from trt_kvcache.builder.build_engine import BUILDING
from trt_kvcache.cli.flag_names import in_flags
from trt_kvcache.cli.interrupt import held_interrupts
from trt_kvcache.cli.verbosity import is_quiet
from trt_kvcache.memory.shapes import MAX_DIMENSION

_WIDTH_OF_A_PIPE = 160


def results() -> Console:
    """Return the console for results, on stdout. Texts are printed as they are, without markup."""
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


def put(text: str) -> None:
    """Write generated text, at once and as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a note on stderr, unless the command is to be quiet."""
    if not is_quiet():
        _print(messages(), Text(text, "dim"))


def warn(text: str) -> None:
    """Print a warning on stderr, unless the command is to be quiet."""
    if not is_quiet():
        _print(messages(), Text.assemble(("warning:", "yellow"), " ", in_flags(text)))


def complain(head: str, text: str = "") -> None:
    """Print on stderr why a command failed."""
    _print(messages(), Text.assemble((head, "red"), f" {in_flags(text)}" if text else ""))


def message_of(error: Exception) -> str:
    """Return what an error says, without the number that the system has for it."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.strerror}." if error.filename is None else f"{error.filename}: {error.strerror}."


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Show the stages of long work in this process as progress bars, if stderr is a terminal."""
    with held_interrupts() as interrupts, progress_display() as show:

        def report(stage: str, done: float | None) -> None:
            interrupts.check()
            interrupts.hold = stage == BUILDING and done != 1.0
            show(stage, done)

        yield report


@contextmanager
def progress_display() -> Iterator[ProgressCallback]:
    """Show the stages of long work as progress bars, if stderr is a terminal; Ctrl-C is left alone."""
    console = messages()
    if is_quiet() or not console.is_terminal:
        yield _ignore
        return
    # The spinner goes on turning where a fraction stands still: one step of TensorRT may take half a minute.
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
    """Return an empty table with these columns, those of ``numbers`` right-aligned."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return made


def size(nbytes: int) -> str:
    """Return a size in bytes as text for people: exact below 1 KiB, otherwise in KiB, MiB, GiB or TiB."""
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
    """Return how many tokens fit in words: ``96 tokens``, or that nothing limits them, as in a cache of states alone."""
    return "any number of tokens" if tokens == MAX_DIMENSION else count(tokens, "token")


def span(first: int, last: int) -> str:
    """Return a range in words: ``3``, or ``3-7``."""
    return str(first) if first == last else f"{first}-{last}"
