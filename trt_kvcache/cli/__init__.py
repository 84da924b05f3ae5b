"""The ``trt-kvcache`` command."""

import sys
from collections.abc import Sequence

from trt_kvcache._util.extras import missing_library
from trt_kvcache.cli.interrupt import held_interrupts

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 wrong usage, 3 ``compare`` found a difference, 130 Ctrl-C."""
    try:
        with held_interrupts():
            from trt_kvcache.cli.app import run
        return run(arguments)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {missing_library(error) or error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
