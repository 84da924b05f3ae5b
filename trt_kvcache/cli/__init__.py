"""The ``trt-kvcache`` command."""

import sys
from collections.abc import Sequence

from trt_kvcache.cli.interrupt import held_interrupts

FAILED, INTERRUPTED = 1, 130

_EXTRAS = {"polygraphy": "polygraphy", "cuda": "cuda", "matplotlib": "plot"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong usage, 3 ``compare`` found a difference, 130 Ctrl-C."""
    try:
        with held_interrupts():
            from trt_kvcache.cli.app import run
        return run(arguments)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0], "models")
        sys.stderr.write(f"error: {error.name} is not installed. Run: pip install 'trt-kvcache[{extra}]'\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
