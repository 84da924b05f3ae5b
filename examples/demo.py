"""The demo behind `make demo`: build an engine, generate text, compare cached decoding with full recomputation.

Each step is a `trt-kvcache` command, printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from trt_kvcache import EngineError
from trt_kvcache.cli import main
from trt_kvcache.session.open_model import why_no_tensorrt
from trt_kvcache.trt.module import load

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path("examples/tiny-llama")
ENGINE = Path("out/demo-engine")
PROMPT = "The rabbit-hole went straight"
NEXT = """
Next, with a small model that answers:
  .venv/bin/trt-kvcache chat examples/tiny-chat
  .venv/bin/trt-kvcache serve examples/tiny-chat    and a browser at http://127.0.0.1:8000"""


def run(*arguments: str) -> int:
    """Print a command, run it, return its exit code."""
    print(f"\n$ trt-kvcache {shlex.join(arguments)}", flush=True)
    return main(arguments)


def demo() -> int:
    """Run the steps; return the exit code of the first that fails."""
    folder = ENGINE
    try:
        load("auto")
    except EngineError as error:
        print(f"No engine is built here ({error}); the NumPy reference engine generates from the checkpoint.")
        folder = MODEL
    if folder is ENGINE and (code := run("build", str(MODEL), "-o", str(ENGINE), "--max-batch-size", "2")):
        return code
    for command in (("generate", "--max-new-tokens", "60"), ("compare", "--steps", "16")):
        if code := run(command[0], str(folder), "--prompt", PROMPT, *command[1:]):
            return code
    if folder is ENGINE and (reason := why_no_tensorrt("auto")):
        print(f"\nThe plan in {ENGINE} was built and not run: {reason.removesuffix('.')}. Other engines ran the checkpoint.")
    print(NEXT)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(demo())
