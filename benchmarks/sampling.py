"""Sampling: the host path, and with ``--gpu`` the kernels beside torch and FlashInfer, checked against the host first.

    python benchmarks/sampling.py [--gpu] [--quick] [--runs 100] [--out FILE]

Host: one row at a time, one thread, the least of many runs. GPU: CUDA graphs over logits that take turns, so that none is in L2; the limit
is the time that reading the logits takes at the copy bandwidth. Needs torch for ``--gpu``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from environment import describe_environment, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache import SamplingParams  # noqa: E402
from trt_kvcache.generation.request import Request  # noqa: E402

VOCABULARIES = (32_000, 128_256, 151_936, 262_144)

#: Longest microseconds of a row on the host, at this vocabulary.
LIMIT_MICROSECONDS, LIMIT_VOCABULARY = 500, 151_936

#: Fields of SamplingParams.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
}

#: What rows look like: as of a language model, nearly the same for all tokens, and with the few tokens that a grammar leaves.
ROWS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "peaked": lambda rng, size: rng.normal(size=size) * 2.5 + np.where(rng.random(size) < 2e-4, rng.exponential(6, size) + 8, 0),
    "normal": lambda rng, size: rng.normal(size=size) * 2,
    "flat": lambda rng, size: rng.normal(size=size) * 0.01,
    "restricted": lambda rng, size: np.where(rng.random(size) < 2e-4, rng.normal(size=size) * 2, -np.inf),
}


def logits_of(kind: str, size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return ROWS[kind](np.random.default_rng(seed), size).astype(np.float32)


def least_seconds(call: Callable[[], object], runs: int) -> float:
    """Return the seconds of the fastest run: the machine may be shared."""
    least = float("inf")
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - begin)
    return least


def host_rows(quick: bool, runs: int) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of one token on the host."""
    for vocab_size in VOCABULARIES[2:3] if quick else VOCABULARIES:
        for kind in ROWS:
            logits = logits_of(kind, vocab_size)
            row: dict[str, Any] = {"vocab": vocab_size, "logits": kind}
            for name, options in CASES.items():
                params = SamplingParams(seed=1, max_new_tokens=10**6, **options)
                request = Request(0, range(1000), params, tokenizer=None, eos_token_ids=())
                row[name] = round(least_seconds(lambda: request.take(request.choose(logits, full=False)), runs) * 1e6, 1)  # noqa: B023
            print(json.dumps(row), flush=True)
            yield row


def longest(rows: list[dict[str, Any]], name: str) -> float:
    """Return the microseconds of a case in its slowest row."""
    return max(float(row[name]) for row in rows if row["vocab"] == LIMIT_VOCABULARY)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the kernels, on this GPU")
    parser.add_argument("--quick", action="store_true", help="a vocabulary of 152k only")
    parser.add_argument("--runs", type=int, default=100, help="of each case on the host; default: %(default)s")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/sampling.json, with --gpu sampling_gpu.json")
    options = parser.parse_args()
    if options.gpu:
        from sampling_gpu import measure

        measured = measure(options.quick)
    else:
        measured: dict[str, Any] = {
            "limit_us": LIMIT_MICROSECONDS,
            "limit_vocab": LIMIT_VOCABULARY,
            "host_us": list(host_rows(options.quick, options.runs)),
        }
    out = options.out or HERE / "results" / ("sampling_gpu.json" if options.gpu else "sampling.json")
    write_result(out, {**describe_environment(gpu=options.gpu), **measured})
    return int(not options.gpu and any(longest(measured["host_us"], name) > LIMIT_MICROSECONDS for name in CASES))


if __name__ == "__main__":
    sys.exit(main())
