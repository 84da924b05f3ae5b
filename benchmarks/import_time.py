"""Time of ``import trt_kvcache``, in fresh interpreters.

    python benchmarks/import_time.py [--out benchmarks/results/import_time.json] [--runs 15]

Beside it: the same with the cache itself, with sessions over Hugging Face folders, and NumPy and ml_dtypes alone, the two
packages that it needs.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from environment import describe_environment, write_result

#: Longest median, in seconds.
LIMIT_SECONDS = 0.2

#: What is imported, and the packages that it may bring along.
MEASURED = {
    "trt_kvcache": frozenset(),
    "trt_kvcache.cache.edge_llm": frozenset(),
    "from trt_kvcache import InferenceSession": frozenset({"tokenizers", "safetensors"}),
    "numpy, ml_dtypes": frozenset(),
}

#: Packages that wait until they are needed.
_LATE = frozenset({"cuda", "jinja2", "polygraphy", "safetensors", "tensorrt", "tensorrt_rtx", "tokenizers", "torch"})

_PROGRAM = """
import sys, time
started = time.perf_counter()
{statement}
print(time.perf_counter() - started)
too_early = {late} & set(sys.modules)
assert not too_early, too_early
"""


def seconds_to_import(what):
    """Import in a fresh interpreter; return the seconds of the import statement."""
    statement = what if what.startswith("from ") else f"import {what}"
    program = _PROGRAM.format(statement=statement, late=set(_LATE - MEASURED[what]))
    output = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output)


def main():
    """Measure, print, write the file; 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description="Time of import trt_kvcache")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "import_time.json")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    measured = {what: [] for what in MEASURED}
    for _ in range(1 + arguments.runs):
        for what, seconds in measured.items():
            seconds.append(seconds_to_import(what))
    # The first one of each may have compiled bytecode.
    results = {what: {"best_s": min(all_[1:]), "median_s": statistics.median(all_[1:])} for what, all_ in measured.items()}
    for what, result in results.items():
        print(f"{what}: best {result['best_s']:.3f} s, median {result['median_s']:.3f} s")
    median = results["trt_kvcache"]["median_s"]
    print(f"limit: {LIMIT_SECONDS} s")
    content = {**describe_environment(), "runs": arguments.runs, "results": results, "limit_s": LIMIT_SECONDS}
    write_result(arguments.out, content)
    return int(median > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
