"""Whole models end to end on one device: ``InferenceSession.generate`` beside Hugging Face transformers. Needs torch and transformers.

    python benchmarks/end_to_end.py [--quick] [--cells 8B] [--sides ours,eager] [--all] [--continue] [--max-seconds 480] [--device cpu]
    python benchmarks/end_to_end.py --cells Gemma-4-E4B --sides ours,eager --out benchmarks/results/end_to_end_gemma_4.json

Models of real shapes get random weights on the device; nothing is read or downloaded. First, tokens are compared: greedy tokens of small
models of the same families must be those of transformers, but for ties of floats. Then each cell (a model, a batch, tokens past) is
measured on each side, and the file is written after each: what was measured stays if the rest is cut off, and ``--continue`` measures
only what is missing. Exit code 1 if tokens differ or a cell failed.

Ours includes top-p sampling, text and a stop text. Those of transformers include sampling and text; ``greedy_step_ms`` is theirs without
both. ``compiled`` takes a minute for each shape, so by default it is measured at a few shapes only (``COMPILED``); ``--all`` has all.
``llama`` is llama.cpp at batch 1, if the environment variable ``LLAMA_BENCH`` names a ``llama-bench`` program.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from end_to_end_models import MODELS, RandomModel, small, tiny
from end_to_end_sides import compiled, eager, greedy_tokens, logits_and_error, ours
from environment import describe_environment, write_result
from weight_schemes import ALL_SCHEMES

from trt_kvcache import CudaMemory, HostMemory
from trt_kvcache.benchmarking import MemoryLimit

HERE = Path(__file__).resolve().parent

#: At 8B: share of the limit at batch 1, and time of transformers with torch.compile over ours at batch 1 and 8. At 0.5B: time of a step in
#: which the engine does not run. Gemma 4 E4B: share of the limit at batch 1.
LIMITS = {
    "of_limit_8b_batch_1": 0.80,
    "of_limit_gemma_4_batch_1": 0.75,
    "compiled_over_ours_8b": {"1": 1.6, "8": 2.0},
    "between_engine_us_05b": 60.0,
}

#: Two logits of transformers are a tie where they differ by at most so many times what its own rounding changes at that place.
TIE = 2.0
#: Packed weights have 16-bit values: with them only the last dtype is compared.
COMPARED_DTYPES, COMPARED_PROMPTS = ("float32", "bfloat16"), (37, 1, 12)
COMPARED_TOKENS, QUICK_TOKENS = 64, 12

BATCHES, PASTS = (1, 8, 32), (1024, 8192)
STEPS = {"ours": 128, "eager": 16, "compiled": 48, "llama": 128}
#: Most seconds of one side of one cell.
SECONDS = {"ours": 60, "eager": 60, "compiled": 200, "llama": 120}
#: Where ``compiled`` is measured without ``--all``: model, batch, past.
COMPILED = {("Llama-3-8B", 1, 1024), ("Llama-3-8B", 8, 1024), ("Qwen2-0.5B", 1, 1024), ("Qwen3-4B", 1, 1024)}
#: Models of which the side ``llama`` writes no file: layers of different sizes.
NOT_IN_LLAMA = {"Gemma-4-E4B"}


class Cell(NamedTuple):
    """What is measured."""

    model: str
    batch: int
    past: int
    side: str

    @property
    def name(self) -> str:
        """How ``--cells`` finds it."""
        return f"{self.model} b{self.batch} p{self.past} {self.side}"


def main() -> int:
    """Compare, measure, write."""
    options = _options()
    content = {
        **describe_environment(gpu=options.device != "cpu"),
        "transformers": _version("transformers"),
        "limits": LIMITS,
        "weights": options.weights,
        "cells": {},
    }
    if options.continued and options.out.is_file():
        content["cells"] = json.loads(options.out.read_text(encoding="utf-8"))["cells"]
    deadline = time.monotonic() + options.max_seconds
    with tempfile.TemporaryDirectory() as folder:
        content["compared"] = compare_all(options, Path(folder))
        write_result(options.out, content)
        for name in MODELS:
            cells = [cell for cell in wanted(options) if cell.model == name and not content["cells"].get(cell.name, {}).get("ok")]
            if cells:
                measure_model(name, cells, options, content, Path(folder), deadline)
                torch._dynamo.reset()  # what was compiled keeps the model
                _free(options.device)
    results = [*content["compared"].values(), *content["cells"].values()]
    return int(not all(one["ok"] or one.get("skipped") for one in results))


def wanted(options: argparse.Namespace) -> list[Cell]:
    """Return the cells, those of a model in the order of its sides: what is quick comes first."""
    shapes = [(batch, past) for past in ((24,) if options.quick else PASTS) for batch in ((1, 3) if options.quick else BATCHES)]
    cells = [Cell(model, *shape, side) for model in MODELS for side in options.sides for shape in shapes]
    everything = options.all or options.quick
    return [
        cell
        for cell in cells
        if all(part in cell.name.split() or part in cell.model for part in options.cells)
        and (everything or cell.side != "compiled" or cell[:3] in COMPILED)
        and (everything or cell.side != "eager" or cell.batch * cell.past <= 8 * max(PASTS))
        and (cell.side != "llama" or (cell.batch == 1 and cell.model not in NOT_IN_LLAMA))
    ]


def measure_model(
    name: str, cells: Sequence[Cell], options: argparse.Namespace, content: dict[str, Any], folder: Path, deadline: float
) -> None:
    """Measure the cells of a model, and write the file after each."""
    memory = _memory(options.device)
    config = tiny(MODELS[name]) if options.quick else MODELS[name]
    model = RandomModel(config, options.device, folder / name, scheme=options.weights, memory=memory)
    limit = MemoryLimit.measured(model.config, model.config.dtype, memory, model.weights)

    def measure(cell: Cell) -> dict[str, Any]:
        steps = 6 if options.quick else STEPS[cell.side]
        if cell.side == "ours":
            return ours(model, memory, limit, cell.batch, cell.past, steps)
        if cell.side == "llama":
            from end_to_end_llama import llama

            return llama(model.config, options.weights, cell.past, steps, folder)
        return {"eager": eager, "compiled": compiled}[cell.side](model, cell.batch, cell.past, steps)

    for cell in cells:
        left = min(SECONDS[cell.side], deadline - time.monotonic())
        result = {**run_cell(partial(measure, cell), left), **cell._asdict(), "copy_gb_per_second": limit.copy_bytes_per_second / 1e9}
        content["cells"][cell.name] = result
        write_result(options.out, content)
        shown = result.get("step_ms") or result.get("error") or "skipped: no time left"
        print(cell.name, json.dumps(shown), f"{result['seconds']:.1f} s", flush=True)
        _free(options.device)


def _free(device: str) -> None:
    """Return memory that nothing uses to the device."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def run_cell(call: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Run a cell within so many seconds. A failure is a result."""
    if seconds < 1:
        return {"ok": False, "skipped": True, "seconds": 0.0}
    started = time.monotonic()
    try:
        with _time_limit(seconds):
            result = {"ok": True, **call()}
    except Exception as error:  # noqa: BLE001  # the other cells are still measured
        result = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
    return {**result, "seconds": time.monotonic() - started}


def compare_all(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Compare greedy tokens of small models of every family and dtype with those of transformers."""
    memory = _memory(options.device)
    count = QUICK_TOKENS if options.quick else COMPARED_TOKENS
    results = {}
    for name, config in MODELS.items():
        for dtype in COMPARED_DTYPES[1:] if options.weights else COMPARED_DTYPES:
            label = f"{name} {dtype}"
            results[label] = run_cell(partial(compare, config, dtype, count, options, memory, folder), 60)
            print("compared", label, json.dumps(results[label]), flush=True)
    return results


def compare(config: dict[str, Any], dtype: str, count: int, options: argparse.Namespace, memory: Any, folder: Path) -> dict[str, Any]:
    """Compare the greedy tokens of a session with those of transformers.

    Where one differs, transformers must have held both tokens for nearly equally likely; ours then goes on from theirs.
    """
    model = RandomModel(small(config, dtype), options.device, folder / "small", scheme=options.weights, memory=memory)
    prompts = [model.prompts(1, length, seed=length)[0] for length in COMPARED_PROMPTS]
    theirs = [greedy_tokens(model, prompt, count) for prompt in prompts]
    ties = []
    with model.session(memory, slots=len(prompts), length=max(COMPARED_PROMPTS) + count, width=16) as session:
        for index, found in enumerate(_greedy(session, prompts, count)):
            done = 0
            while (first := _first_difference(found, theirs[index][done:])) is not None:
                at = done + first
                logits, error = logits_and_error(model, [*prompts[index], *theirs[index][:at]])
                gap = float(logits[theirs[index][at]] - logits[found[first]])
                if not gap <= TIE * error:
                    raise AssertionError(
                        f"prompt {index}, token {at}: expected {theirs[index][at]}, got {found[first]}, whose logit is {gap:.2e} less; "
                        f"rounding changes logits by {error:.2e}"
                    )
                ties.append({"prompt": index, "token": at, "gap": gap, "rounding": error})
                done = at + 1
                if done == count:
                    break
                [found] = _greedy(session, [[*prompts[index], *theirs[index][:done]]], count - done)
    return {"tokens": count * len(prompts), "distinct": len({token for row in theirs for token in row}), "ties": ties}


def _greedy(session: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for token in session.generate(prompts, max_new_tokens=count, ignore_eos=True):
        found[token.index].append(token.token)
    return found


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((place for place, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds, as soon as Python runs."""

    def expire(number: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _memory(device: str) -> Any:
    return HostMemory() if device == "cpu" else CudaMemory()


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny models: tries the script, measures nothing of use")
    parser.add_argument("--all", action="store_true", help="every side at every shape")
    parser.add_argument("--continue", dest="continued", action="store_true", help="keep the cells of the file that --out names")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=[], help="only cells with all of these: 8B, b1, p1024")
    parser.add_argument("--sides", type=lambda text: text.split(","), help="ours, eager, compiled, llama; default: all that can run")
    parser.add_argument("--weights", choices=ALL_SCHEMES, help="packed weights, of which transformers has the values in 16 bits")
    parser.add_argument("--max-seconds", type=float, default=480.0, help="begin no cell after so long")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "end_to_end.json")
    options = parser.parse_args()
    has_llama = "LLAMA_BENCH" in os.environ
    if options.sides is None:
        options.sides = [side for side in STEPS if side != "llama" or has_llama]
    if "llama" in options.sides and not has_llama:
        parser.error("--sides llama: expected a path of llama-bench in the environment variable LLAMA_BENCH, which is not set.")
    if (options.quick or options.device == "cpu" or options.weights) and options.out == parser.get_default("out"):
        parser.error("expected --out with --quick, --device cpu and --weights, which measure nothing that belongs into the results.")
    return options


if __name__ == "__main__":
    sys.exit(main())
