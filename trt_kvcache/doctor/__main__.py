"""``python -m trt_kvcache.doctor``: the same as ``trt-kvcache doctor``, without the libraries of the command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trt_kvcache.doctor.catalog import BY_LETTER, CHECKS
from trt_kvcache.doctor.run import run_doctor, say_on_stdout
from trt_kvcache.engine.flavours import FLAVOURS
from trt_kvcache.errors import KVCacheError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trt_kvcache.doctor", description="Check a GPU, its driver and TensorRT.")
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="a Hugging Face folder to check too")
    parser.add_argument("--full", action="store_true", help="also checks that take minutes")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: host memory and NumPy in the place of GPU and TensorRT")
    parser.add_argument("--checks", default="", metavar="LETTERS", help="only A and these, such as BF; no verdict is kept then")
    parser.add_argument("--flavour", choices=FLAVOURS, default="auto", help="which TensorRT")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the report there as JSON, and beside it as Markdown")
    given = parser.parse_args(arguments)
    unknown = set(given.checks) - set(BY_LETTER)
    if unknown:
        parser.error(f"--checks: expected letters of {''.join(BY_LETTER)}, got {given.checks!r}.")
    try:
        return run_doctor(
            model=given.model,
            full=given.full,
            dry_run=given.dry_run,
            flavour=given.flavour,
            device=given.device,
            output=given.output,
            say=say_on_stdout,
            checks=[check for check in CHECKS if check.letter in given.checks] if given.checks else CHECKS,
        )
    except (KVCacheError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
