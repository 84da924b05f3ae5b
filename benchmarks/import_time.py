"""Time of ``import trt_kvcache``, in fresh interpreters.

    python benchmarks/import_time.py [--out benchmarks/results/import_time.json] [--runs 15]

Beside it: the same with the cache itself, and NumPy and ml_dtypes alone, the two packages that it needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from environment import describe_environment

#: Longest median, in seconds.
LIMIT_SECONDS = 0.2

_PROGRAM = """
import sys, time
started = time.perf_counter()
import {modules}
print(time.perf_counter() - started)
assert not {{"cuda", "tensorrt", "tensorrt_rtx", "tokenizers", "safetensors"}} & set(sys.modules)
"""


def seconds_to_import(modules: str) -> float:
    """Import in a fresh interpreter; return the seconds of the import statement."""
    program = _PROGRAM.format(modules=modules)
    output = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(output)


def main() -> int:
    """Measure, print, write the file; 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description="Time of import trt_kvcache")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "import_time.json")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    measured: dict[str, list[float]] = {"trt_kvcache": [], "trt_kvcache.manager": [], "numpy, ml_dtypes": []}
    for _ in range(1 + arguments.runs):
        for modules, seconds in measured.items():
            seconds.append(seconds_to_import(modules))
    # The first one of each may have compiled bytecode.
    results = {modules: {"best_s": min(all_[1:]), "median_s": statistics.median(all_[1:])} for modules, all_ in measured.items()}
    for modules, result in results.items():
        print(f"import {modules}: best {result['best_s']:.3f} s, median {result['median_s']:.3f} s")
    median = results["trt_kvcache"]["median_s"]
    print(f"limit: {LIMIT_SECONDS} s")
    content = {**describe_environment(), "runs": arguments.runs, "results": results, "limit_s": LIMIT_SECONDS}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(median > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
