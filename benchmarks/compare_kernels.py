"""The attention kernels of two checkouts on one GPU, old against new: is the new one right, and is it as fast. Needs torch.

    python benchmarks/compare_kernels.py --old CHECKOUT [--rounds 7] [--max-seconds 300] [--out benchmarks/results/compare_kernels.json]

For whoever changes an attention kernel. CHECKOUT holds ``plugins/`` and ``trt_kvcache/`` of the old kernels; the new ones are those of
this checkout. First the new kernels are compared with float64. Then both are measured in one process over the same buffers, in CUDA
graphs whose calls take turns over several caches, so that none is in L2. Old and new alternate from round to round, because clocks
drift by more than what is to be seen. Exit code 1 if a limit is exceeded, 2 without a GPU or torch.

The launches of this checkout serve both sides. Both must therefore have the same entry points with the same arguments and tiles; the
files that they stand in may have other names.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from environment import commit_of, describe_environment, to_table, write_result

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from trt_kvcache.errors import CudaError  # noqa: E402
from trt_kvcache.kernels import launch as launcher  # noqa: E402
from trt_kvcache.memory.cuda_driver import cuda_core_error  # noqa: E402
from trt_kvcache.memory.cuda_memory import find_gpu  # noqa: E402

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import attention
    import torch

#: Of a shape: new time over old, as the median of the rounds, and the largest difference of the outputs over the largest output. Each
#: side may be 1e-3 from the exact output (``tests/kernels/attention.py``).
LIMITS = {"new_over_old": 1.01, "output_difference": 2e-3}

#: Draws of uneven lengths, whose times are added up: one draw alone says little, because the same two kernels differ by -3 to 4 % from one
#: to the next.
DRAWS = 4

SIDES = ("old", "new")
DTYPE = "float16"

#: A call takes about the bytes of K and V over this speed, or the operations over that one: so is the length of a graph chosen.
_BYTES_PER_SECOND, _FLOP_PER_SECOND, _MIN_SECONDS = 4e12, 4e14, 3e-6

#: Both run in a process of their own, which imports the package of the checkout that PYTHONPATH names.
_LIST_SOURCES = "from trt_kvcache.kernels.sources import source_names; print(*source_names(), sep='\\n')"
_COMPILE_SOURCE = """
import sys
from pathlib import Path
from trt_kvcache.kernels.compile import compile_cubin

name, arch, cubin = sys.argv[1:]
Path(cubin).write_bytes(compile_cubin(name, arch))
"""


class Case(NamedTuple):
    """One shape that is measured. ``past`` is the tokens in the cache, of the longest slot; ``group`` the query heads of a K/V head."""

    kind: str
    batch: int
    width: int
    past: int
    group: int
    head_dim: int

    @property
    def shape(self) -> attention.Shape:
        """What ``attention.py`` calls a shape."""
        return attention.Shape(self.batch, self.width, self.past, self.group, self.head_dim)


def cases() -> list[Case]:
    """Return what is measured, in this order."""
    batches_and_lengths = ((1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (32, 4096))
    groups_and_dims = ((16, 128), (4, 64), (16, 64), (4, 256), (16, 256), (4, 80), (4, 96))
    return [
        *(Case("decode", batch, 1, past, group, 128) for batch, past in batches_and_lengths for group in (1, 4, 8)),
        *(Case("decode", batch, 1, 8192, group, dim) for batch in (1, 8) for group, dim in groups_and_dims),
        Case("decode, uneven lengths", 8, 1, 8192, 4, 128),
        Case("decode, uneven lengths", 32, 1, 8192, 4, 128),
        Case("decode, uneven lengths", 8, 1, 32768, 8, 128),
        Case("decode, uneven lengths", 8, 1, 8192, 4, 256),
        *(Case("prefill", 1, width, 0, 4, 128) for width in (64, 512, 2048, 8192)),
        Case("prefill", 1, 512, 8192, 4, 128),
        *(Case("prefill", 1, width, 0, 4, dim) for dim in (64, 256) for width in (512, 4096)),
        Case("prefill", 1, 2048, 0, 4, 80),
    ]


def _run_in(checkout: Path, script: str, *arguments: str) -> str:
    """Run a Python script with the package of a checkout, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CudaError(f"{checkout}: exit code {done.returncode}\n{done.stderr.strip()}")
    return done.stdout


def attention_sources(checkout: Path) -> list[str]:
    """Return the source names of a checkout that are attention kernels, such as ``"attention_decode-float16-128"``: they have variants."""
    return [name for name in _run_in(checkout, _LIST_SOURCES).split() if variant_of(name) and not name.startswith(("linear", "recurrent"))]


def variant_of(source: str) -> str:
    """Return the variant that a source name ends with, such as ``"float16-128"``; nothing for a source without variants."""
    return source.partition("-")[2]


def compile_attention(checkout: Path, arch: str, folder: Path) -> dict[str, Path]:
    """Compile the attention kernels of a checkout into a folder. Returns the file of each source name."""
    folder.mkdir(parents=True)
    cubins = {name: folder / f"{name}.cubin" for name in attention_sources(checkout)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: _run_in(checkout, _COMPILE_SOURCE, name, arch, str(cubins[name])), cubins))
    return cubins


class Kernels:
    """The kernels of both checkouts. Those of ``side`` are launched."""

    def __init__(self, cubins: dict[str, dict[str, Path]]) -> None:
        self._cubins = cubins
        self.side = "new"
        self._find = functools.cache(self._find_uncached)
        self._module = functools.cache(self._load_module)

    def kernel(self, source: str, name: str, arch: str) -> Any:
        """Return a kernel; takes the place of the launcher's own search."""
        return self._find(self.side, variant_of(source), name)

    def _find_uncached(self, side: str, variant: str, name: str) -> Any:
        """Search all sources of this variant for the entry point, because the checkouts may name their sources differently."""
        for source in self._cubins[side]:
            if variant_of(source) == variant:
                try:
                    return self._module(side, source).get_kernel(name)
                except cuda_core_error():  # it is in another source
                    continue
        raise CudaError(f"the {side} kernels: expected {name} for {variant} in one of {', '.join(self._cubins[side])}, got none.")

    def _load_module(self, side: str, source: str) -> Any:
        from cuda.core import ObjectCode

        return ObjectCode.from_cubin(self._cubins[side][source].read_bytes(), name=source)


@contextmanager
def launching(kernels: Kernels) -> Iterator[None]:
    """Let every launch of this package take the kernels of these checkouts."""
    own = launcher._kernel
    launcher._kernel = kernels.kernel
    try:
        yield
    finally:
        launcher._kernel = own


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no collection happen by itself: one that frees device memory while a graph is captured would spoil the capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage(gpu: attention.Gpu) -> None:
    """Free the tensors and graphs of the last case, once the device has done with them."""
    gpu.stream.sync()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.synchronize()


def _seconds_of_a_call(case: Case) -> float:
    """Return about how long one call takes."""
    if case.width == 1:
        return max(attention._nbytes(case.shape) / _BYTES_PER_SECOND, _MIN_SECONDS)
    return max(attention._flop(case.shape) / _FLOP_PER_SECOND, _MIN_SECONDS)


def draw_lengths(problem: attention.Problem, case: Case) -> list[Any]:
    """Return the lengths to measure with, once each. Of uneven ones one is the longest, and the others are at most an eighth of it."""
    if case.kind != "decode, uneven lengths":
        return [problem.lengths.clone()]
    draws = []
    for seed in range(1, DRAWS + 1):
        lengths = torch.randint(1, case.past // 8, (case.batch,), generator=torch.Generator(device="cpu").manual_seed(seed))
        lengths[0] = case.past - 1
        draws.append(lengths.to(problem.lengths))
    return draws


def _output(gpu: attention.Gpu, problem: attention.Problem, call: Any) -> Any:
    """Return the output of one call in float64. What it does not write is NaN."""
    problem.out.fill_(torch.nan)
    call(gpu.stream)
    torch.cuda.synchronize()
    return problem.out.double().clone()


def _capture(gpu: attention.Gpu, calls: Sequence[Any]) -> Any:
    """Return a CUDA graph of all calls."""
    builder = gpu.stream.create_graph_builder()
    builder.begin_building()
    for call in calls:
        call(builder)
    return builder.end_building().complete()


def measure_case(gpu: attention.Gpu, kernels: Kernels, case: Case, rounds: int) -> dict[str, Any]:
    """Measure one case: microseconds of a call of each side, and the ratios of the rounds."""
    problem = attention._problem(gpu, case.shape)
    draws = draw_lengths(problem, case)
    calls = attention._repeated(problem.rows["rope_append_attention"], _seconds_of_a_call(case))
    graphs = {}
    outputs: dict[str, list[Any]] = {side: [] for side in SIDES}
    for lengths in draws:  # both sides in turn: a call appends a token, which may be a past one of the next draw
        problem.lengths.copy_(lengths)
        for side in SIDES:
            kernels.side = side
            outputs[side].append(_output(gpu, problem, calls[0]))
    for side in SIDES:
        kernels.side = side
        graphs[side] = _capture(gpu, calls)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(rounds):
        times = dict.fromkeys(SIDES, 0.0)
        for lengths in draws:
            problem.lengths.copy_(lengths)
            for side in SIDES if index % 2 == 0 else reversed(SIDES):
                launch = functools.partial(graphs[side].launch, gpu.stream)
                times[side] += attention._elapsed(launch) / len(calls) / len(draws)
        for side in SIDES:
            seconds[side].append(times[side])
    difference = max(float((new - old).abs().max() / old.abs().max()) for old, new in zip(outputs["old"], outputs["new"], strict=True))
    return {**case._asdict(), **summarize(seconds["old"], seconds["new"]), "output_difference": float(f"{difference:.2e}")}


def summarize(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """Return the medians of the seconds of all rounds in microseconds, and the median, least and largest ratio of a round."""
    ratios = [after / before for before, after in zip(old, new, strict=True)]
    return {
        "old_us": round(median(old) * 1e6, 3),
        "new_us": round(median(new) * 1e6, 3),
        "new_over_old": round(median(ratios), 4),
        "spread": {"least": round(min(ratios), 4), "largest": round(max(ratios), 4)},
    }


def geometric_mean(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the geometric mean of the ratios of all cases; None without a case."""
    return round(math.exp(sum(math.log(row["new_over_old"]) for row in rows) / len(rows)), 4) if rows else None


def exceeded(rows: Sequence[dict[str, Any]], left_out: Sequence[str]) -> list[str]:
    """Return the limits that are not kept, and what was to be measured and was not."""
    slow = [
        f"{row['kind']}, {' '.join(f'{key} {row[key]}' for key in Case._fields[1:])}: {name} {row[name]}"
        for row in rows
        for name, limit in LIMITS.items()
        if not row[name] <= limit  # NaN is over the limit
    ]
    return slow + [f"left out: {one}" for one in left_out] + ([] if rows else ["nothing was measured"])


def measure(old: Path, *, rounds: int, max_seconds: float) -> dict[str, Any]:
    """Compile, check and measure it all. What does not fit into the memory or the time is named and left out."""
    deadline = time.monotonic() + max_seconds
    gpu = attention.Gpu()
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    memory_nbytes = torch.cuda.get_device_properties(0).total_memory
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"old": old, "new": ROOT}
        cubins = {side: compile_attention(checkouts[side], gpu.memory.arch, Path(folder) / side) for side in SIDES}
        kernels = Kernels(cubins)
        with launching(kernels), torch.cuda.stream(gpu.torch_stream):
            errors = {which: attention.check(gpu, which) for which in ("decode", "prefill")}
            print(f"the new kernels are right; largest errors: {errors}", flush=True)
            with no_garbage_collection():
                for case in cases():
                    fits = 2.5 * attention._nbytes(case.shape) < memory_nbytes
                    if not fits or time.monotonic() > deadline:
                        left_out.append(f"{case}: {'time' if fits else 'memory'}")
                        continue
                    rows.append(measure_case(gpu, kernels, case, rounds))
                    print(json.dumps(rows[-1]), flush=True)
                    collect_garbage(gpu)
    return {
        "old_commit": commit_of(old),
        "limits": LIMITS,
        "kv_heads": attention.KV_HEADS,
        "dtype": DTYPE,
        "rounds": rounds,
        "errors": errors,
        "geometric_mean": geometric_mean(rows),
        "cases": rows,
        "left_out": left_out,
        "exceeded": exceeded(rows, left_out),
    }


def cannot_run(old: Path) -> str | None:
    """Return why nothing can be measured here; None if it can."""
    reason = find_gpu()
    if reason is not None:
        return f"no GPU: {reason}"
    if not HAS_TORCH:
        return "torch is not installed: pip install torch"
    missing = [name for name in ("plugins", "trt_kvcache") if not (old / name).is_dir()]
    return f"--old: expected a checkout with plugins/ and trt_kvcache/, got {old} without {missing[0]}/" if missing else None


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, metavar="CHECKOUT", help="holds plugins/ and trt_kvcache/ of the old kernels")
    parser.add_argument("--rounds", type=int, default=7, help="old and new are measured once in each; default: %(default)s")
    parser.add_argument("--max-seconds", type=float, default=300, help="then the rest is left out; default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "compare_kernels.json")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds: expected at least 1")
    old = arguments.old.resolve()
    reason = cannot_run(old)
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    result = measure(old, rounds=arguments.rounds, max_seconds=arguments.max_seconds)
    print(f"geometric mean of new over old: {result['geometric_mean']} (each shape at most {LIMITS['new_over_old']})")
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    write_result(arguments.out, {**describe_environment(gpu=True), **result, "cases": to_table(result["cases"])})
    return 1 if result["exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
