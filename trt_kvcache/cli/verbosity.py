"""``-q`` and ``-v``, options of all commands: the amount of output on stderr apart from errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import typer

from trt_kvcache.cli.option_groups import WrongUsage

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)

_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only: no notes, warnings, statistics or progress.")]
_Verbose = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Print the log on stderr, with TensorRT's messages; -vv prints all of them."
    ),
]

#: Name, default and annotation of the options.
SHARED_OPTIONS = (("quiet", False, _Quiet), ("verbose", 0, _Verbose))


def is_quiet() -> bool:
    """Return True if the running command has ``--quiet``."""
    return _quiet.get()


@contextmanager
def chosen_verbosity(*, quiet: bool, verbose: int) -> Iterator[None]:
    """Set the verbosity for a ``with`` block; ``verbose`` counts ``-v``."""
    if quiet and verbose:
        raise WrongUsage("expected --quiet or --verbose, got both.")
    logger = logging.getLogger("trt_kvcache")
    level, propagate = logger.level, logger.propagate
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    token = _quiet.set(quiet)
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR if quiet else _LEVELS[min(verbose, len(_LEVELS) - 1)])
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        _quiet.reset(token)
