"""The attention kernels on a GPU, beside those of others: is it right, and how fast is it. Needs torch.

    python benchmarks/attention.py [--quick] [--max-seconds 420] [--only decode|chunks|prefill] [--dims 64,128]
                                   [--tiles WARPS=8,TILE_KEYS=64,...]

Decode, against the copy bandwidth: caches take turns, so that none is in L2. Chunks, of several new tokens over a past, against a decode
step. Prefill, against a matrix product of torch. Each has two times: of append and attention, and of RoPE, append and attention; the others
only attend. All run in CUDA graphs. First everything is compared with float64. ``--tiles`` tries other tiles in the kernel of ``--only``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from attention_peers import Call, peer_versions, peers
from environment import describe_environment, to_table, write_result
from torch.nn.attention import SDPBackend

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from tests.kernels import attention as cases  # noqa: E402
from trt_kvcache import CudaMemory, DeviceTensor  # noqa: E402
from trt_kvcache.dtypes import itemsize  # noqa: E402
from trt_kvcache.kernels import (  # noqa: E402
    AttentionWorkspace,
    attend,
    attention_tiles,
    decode_plan as planner,
    source_variants,
)
from trt_kvcache.memory.shapes import dense_nbytes  # noqa: E402

#: Decode: share of the copy bandwidth from 64 MB, and microseconds up to 8 MB; its time over the best other's from 64 MB, and with 8
#: query heads over 1 (these differ by 2 % from run to run). Chunks: their time over that of one new token, for up to 8 and for 16 of
#: them, or so many microseconds more up to 8 MB; and over the best other's. Prefill: TFLOP/s over torch's FLASH_ATTENTION.
LIMITS = {
    "of_copy": 0.85,
    "small_us": 8.0,
    "of_best_peer": 1.02,
    "group_8_of_1": 1.02,
    "8_of_1": 1.3,
    "16_of_1": 1.6,
    "small_more_us": 4.0,
    "chunk_of_best_peer": 1.02,
    "of_flash": 0.9,
}

KV_HEADS, RUNS, ROUNDS, _LARGE_MB, _SMALL_MB, _MIB = 8, 7, 3, 64, 8, 2**20
_ROTATED_NBYTES, _GRAPH_SECONDS = 256 * _MIB, 2e-3  # several times an L2; of work in a graph, where all caches once is less
_REST_SECONDS, _WARM_SECONDS = 0.15, 0.1


class Shape(NamedTuple):
    """What is measured: past tokens at most, query heads of a K/V head."""

    batch: int
    width: int
    past: int
    group: int
    head_dim: int
    kv_heads: int = KV_HEADS


_LARGE = {
    "decode": [
        *((5, 1, 40000, 4, 128), (3, 1, 9000, 16, 256), (70, 1, 3000, 8, 64)),
        *((9, 1, 5000, 1, 128), (1, 1, 131000, 8, 96), (4, 1, 6000, 7, 80), (9, 1, 5000, 4, 256)),
    ],
    "prefill": [
        *((2, 1500, 0, 4, 128), (2, 333, 2100, 4, 128), (1, 600, 77, 2, 256)),
        *((2, 1000, 500, 1, 64), (2, 700, 10, 4, 96), (1, 500, 0, 8, 80)),
    ],
    "chunks": [
        *((1, 2, 40000, 7, 128), (3, 8, 9000, 4, 256), (9, 5, 3000, 8, 64)),
        *((2, 40, 5000, 4, 128), (1, 17, 131000, 2, 96), (4, 100, 6000, 7, 80), (2, 33, 5000, 2, 256)),
    ],
}


def shapes(which: str, quick: bool, dims: Sequence[int]) -> list[Shape]:
    """Return what is measured, in the order of :data:`_LARGE`."""
    if which == "chunks":
        return _chunks(quick, dims)
    heads = [(4, 128), (8, 128), (1, 128), (4, 64), (4, 256)][: 1 if quick else None]
    heads = [one for one in heads if one[1] in dims] or [(4, dim) for dim in dims]
    if which == "decode":
        lengths = (1024, 8192, 32768) if quick else (1024, 4096, 8192, 32768, 131072)
        return [Shape(batch, 1, length, *one) for batch in (1, 8, 32) for length in lengths for one in heads]
    widths = (2048, 8192) if quick else (512, 1024, 2048, 8192)
    few = (
        []
        if quick
        else [
            Shape(1, width, 0, group, dim, n)
            for n, group, dim in ((2, 4, 128), (2, 1, 128), (32, 1, 128), (2, 4, 256))
            for width in (512, 1024)
        ]
    )
    chunks = [] if quick else [Shape(1, 512, 8192, *heads[0]), Shape(1, 2048, 32768, *heads[0])]
    return [Shape(1, width, 0, *one) for one in heads for width in widths] + [one for one in few if one.head_dim in dims] + chunks


def _chunks(quick: bool, dims: Sequence[int]) -> list[Shape]:
    """Several new tokens over a past, beside one; and models of few heads."""
    widths = (1, 2, 8, 16, 128) if quick else (1, 2, 8, 16, 32, 128, 512)
    models = [(4, 128, 8), (7, 128, 4), (4, 64, 8), (2, 256, 8), (8, 512, 2)]
    models = [one for one in models if one[1] in dims][: 1 if quick else None]
    sizes = [(1, 1024), (1, 8192)] if quick else [(1, 1024), (1, 8192), (1, 32768), (8, 8192)]
    small = [] if quick else [(1, 128, 7, 64, 2), (4, 2048, 7, 64, 2), (1, 16384, 8, 128, 1), (4, 1024, 4, 128, 4), (1, 2048, 1, 128, 32)]
    shapes = [Shape(batch, width, past, *model) for model in models for batch, past in sizes for width in widths]
    shapes += [Shape(batch, width, past, *model) for batch, past, *model in small for width in (1, 2, 8, 64)]
    return [one for one in shapes if one.head_dim in dims]


class Gpu:
    """Our memory and stream, and torch on that stream."""

    def __init__(self) -> None:
        self.memory = CudaMemory()
        self.stream = self.memory.create_stream()
        self.torch_stream = torch.cuda.ExternalStream(int(self.stream.handle))
        self._caches: tuple[Any, list[tuple[DeviceTensor, Any]]] = (None, [])

    def tensor(self, shape: tuple[int, ...], dtype: str = "float16") -> tuple[DeviceTensor, Any]:
        """Return a tensor, and torch's view of it, filled with random numbers."""
        mine = DeviceTensor(self.memory.allocate(dense_nbytes(shape, dtype), stream=self.stream), shape=shape, dtype=dtype)
        view = torch.from_dlpack(mine)
        return mine, view.zero_() if dtype == "int32" else view.normal_()

    def caches(self, shape: tuple[int, ...], dtype: str, copies: int) -> list[tuple[DeviceTensor, Any]]:
        """Return so many tensors: those of the last time, if they are alike, so that what is compared lies in the same memory."""
        if self._caches[0] != (shape, dtype, copies):
            self._caches = (None, [])
            torch.cuda.empty_cache()
            self._caches = ((shape, dtype, copies), [self.tensor(shape, dtype) for _ in range(copies)])
        return self._caches[1]

    def seconds(self, calls: Sequence[Callable[[Any], object]], least: float) -> float:
        """Return the seconds of one of our calls, in a graph of all of them; ``least`` is about what one takes."""
        calls[0](self.stream)
        builder = self.stream.create_graph_builder()
        builder.begin_building()
        for call in (repeated := _repeated(calls, least)):
            call(builder)
        graph = builder.end_building().complete()
        return _elapsed(lambda: graph.launch(self.stream)) / len(repeated)


def _repeated(calls: Sequence[Any], least: float) -> list[Any]:
    return [*calls] * max(1, min(64, round(_GRAPH_SECONDS / least)) // len(calls))


def _elapsed(call: Call) -> float:
    """Return the seconds of a call, after a rest, for clocks are low at the power limit, and some calls, for so they are after a pause."""
    torch.cuda.synchronize()
    time.sleep(_REST_SECONDS)
    times, warm = [], time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < warm:
        call()
        torch.cuda.synchronize()
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _torch_seconds(calls: Sequence[Call], least: float) -> float:
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (repeated := _repeated(calls, least)):
            call()
    return _elapsed(graph.replay) / len(repeated)


def _copy_bandwidth() -> float:
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return 2 * source.numel() / _elapsed(lambda: to.copy_(source))


def _matrix_peak() -> float:
    a, b = (torch.randn((8192, 8192), dtype=torch.float16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / _elapsed(lambda: a @ b)


class Problem:
    """One shape: tensors, and calls of ours over ``copies`` caches."""

    def __init__(self, gpu: Gpu, shape: Shape, copies: int = 1, dtype: str = "float16") -> None:
        batch, width, past, group, dim, kv_heads = shape
        heads, tokens = kv_heads * group, past + width
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
        workspace = AttentionWorkspace(gpu.memory, **sizes, stream=gpu.stream)
        (q, self.q), (out, self.out) = (gpu.tensor((batch, width, heads, dim), dtype) for _ in range(2))
        (k, self.k), (v, self.v) = (gpu.tensor((batch, width, kv_heads, dim), dtype) for _ in range(2))
        lengths, self.lengths = gpu.tensor((batch,), "int32")
        table, angles = gpu.tensor((tokens, 2, dim // 2), "float32")
        self.lengths.fill_(past)
        angles.copy_(torch.stack([angles[:, 0].cos(), angles[:, 0].sin()], 1))
        made = gpu.caches((batch, 2, kv_heads, tokens, dim), dtype, copies)
        self.caches = [view for _, view in made]

        fixed = {"q": q, "k": k, "v": v, "lengths": lengths, "out": out}

        def calls(**options: Any) -> list[Callable[[Any], object]]:
            options |= {**fixed, "workspace": workspace}
            return [lambda stream, c=cache: attend(**options, cache=c, stream=stream) for cache, _ in made]

        self.calls = calls()
        self.rows = {"attention": self.calls, "rope_append_attention": calls(cos_sin=table)}

    def error(self) -> float:
        """Return max|error| / max|reference| over slots and some heads, without RoPE; the reference is in float64."""
        worst, (batch, width, heads, dim) = 0.0, self.q.shape
        for slot in range(batch):
            n = int(self.lengths[slot]) + width
            future = torch.ones(width, n, dtype=torch.bool, device="cuda").triu(n - width + 1)
            for head in range(0, heads, max(heads // 4, 1)):
                keys, values = self.caches[0][slot, :, head * self.k.shape[2] // heads, :n].double()
                scores = (self.q[slot, :, head].double() @ keys.T) * dim**-0.5
                expected = scores.masked_fill(future, -torch.inf).softmax(-1) @ values
                error = float((self.out[slot, :, head].double() - expected).abs().max() / expected.abs().max())
                worst = max(worst, error if error == error else torch.inf)
        return worst


def check(gpu: Gpu, which: str) -> dict[str, float]:
    """Compare; the dead rows are NaN. Returns the largest error of the large shapes for each dtype."""
    errors: dict[str, float] = {}
    for dtype, tolerance in cases.TOLERANCE.items():
        for case in getattr(cases, f"{which.upper()}_CASES", {}).values():
            cases.check(dataclasses.replace(case, dtype=dtype), gpu.memory, gpu.stream)
        for shape in _LARGE[which]:
            problem = Problem(gpu, Shape(*shape), dtype=dtype)
            problem.lengths.copy_(torch.randint(0, shape[2] + 1, (shape[0],), device="cuda"))
            for slot, length in enumerate(problem.lengths.tolist()):
                problem.caches[0][slot, :, :, length:] = torch.nan
            for _ in range(2):
                problem.calls[0](gpu.stream)
            error = problem.error()
            assert error <= tolerance, f"{which}, {dtype}, {shape}: error {error:.2e} over {tolerance:g}"
            errors[dtype] = max(errors.get(dtype, 0.0), float(f"{error:.2e}"))
    return errors


def _shape(row: dict[str, Any]) -> Shape:
    return Shape(*(row[key] for key in Shape._fields))


def _nbytes(shape: Shape) -> int:
    return shape.batch * 2 * shape.kv_heads * (shape.past + shape.width) * shape.head_dim * itemsize("float16")


def _flop(shape: Shape) -> float:
    pairs = shape.width * shape.past + shape.width * (shape.width + 1) / 2
    return 4 * shape.batch * shape.kv_heads * shape.group * shape.head_dim * pairs


def _problem(gpu: Gpu, shape: Shape) -> Problem:
    return Problem(gpu, shape, max(1, min(64 if shape.past > shape.width else 4, -(-_ROTATED_NBYTES // _nbytes(shape)))))


def measure_ours(gpu: Gpu, alike: Sequence[Shape], least: Callable[[Shape], float]) -> Iterator[dict[str, Any]]:
    """Measure shapes over the same caches, in turns: microseconds of each row, and what share of the peak of this GPU it has."""
    problems = {shape: _problem(gpu, shape) for shape in alike}
    times: dict[tuple[Shape, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS if len(alike) > 1 else 1):
        for shape, problem in problems.items():
            for name, calls in problem.rows.items():
                times[shape, name].append(gpu.seconds(calls, least(shape)))
    for shape, problem in problems.items():
        seconds = {name: median(times[shape, name]) for name in problem.rows}
        yield {
            **shape._asdict(),
            "kv_mb": round(_nbytes(shape) / _MIB, 1),
            "us": {name: round(one * 1e6, 2) for name, one in seconds.items()},
            "of_copy" if shape.width == 1 else "of_matrix_peak": {name: round(least(shape) / one, 3) for name, one in seconds.items()},
            **({} if shape.width == 1 else {"tflops": {name: round(_flop(shape) / one / 1e12, 1) for name, one in seconds.items()}}),
        }


def measure_peers(made: Iterable[tuple[str, Callable[[], list[Call]]]], least: float) -> dict[str, Any]:
    """Measure others at a shape, by what makes their calls: microseconds, or why not."""
    others: dict[str, Any] = {}
    for name, make in made:
        try:
            others[name] = round(_torch_seconds(make(), least) * 1e6, 2)
        except (RuntimeError, ImportError, OSError, TypeError, ValueError, AttributeError, AssertionError) as error:
            others[name] = f"{type(error).__name__}: {error}"[:120]
            torch.cuda.synchronize()
    return others


def measure(
    quick: bool = False, *, max_seconds: float = 420, only: str | None = None, dims: Sequence[int] = (64, 128, 256)
) -> dict[str, Any]:
    """Check and measure it all. What does not fit into the memory or the time is named and left out.

    Others come last: once their kernels are loaded, each launch of anything takes some tenths of a microsecond more.
    """
    gpu, deadline = Gpu(), time.monotonic() + max_seconds
    result: dict[str, Any] = {"peer_versions": peer_versions(), "limits": LIMITS, "kv_heads": KV_HEADS, "dtype": "float16", "left_out": []}
    names = [only] if only else ["decode", "chunks", "prefill"]
    memory_nbytes = torch.cuda.get_device_properties(0).total_memory
    with torch.cuda.stream(gpu.torch_stream):
        result["errors"] = {which: check(gpu, which) for which in names}
        copy, peak = _copy_bandwidth(), _matrix_peak()
        result |= {"copy_gb_per_second": round(copy / 1e9), "matrix_tflops": round(peak / 1e12)}

        def least(shape: Shape) -> float:
            return max(_nbytes(shape) / copy, _flop(shape) / peak)

        for which in names:
            result[which] = []
            for _, group in groupby(shapes(which, quick, dims), lambda shape: (*shape[:3], *shape[4:])):
                alike = list(group)
                fits = 2.5 * _nbytes(alike[0]) < memory_nbytes
                if not fits or time.monotonic() > deadline:
                    result["left_out"] += [f"{which} {shape}: {'time' if fits else 'memory'}" for shape in alike]
                    continue
                for row in measure_ours(gpu, alike, least):
                    print(json.dumps(row), flush=True)
                    result[which].append(row)
        compared = (row for which in names for row in result[which] if which != "chunks" or row["width"] > 1)
        for row in compared:
            shape = _shape(row)
            late = time.monotonic() > deadline
            row["peers_us"] = {} if late else measure_peers(peers(_problem(gpu, shape), shape), least(shape))
            if late:
                result["left_out"].append(f"others at {shape}: time")
            print(json.dumps(row), flush=True)
            torch.cuda.empty_cache()
    return {**result, "exceeded": exceeded(result)}


def exceeded(result: dict[str, Any]) -> list[str]:
    """Return the limits that a result does not keep, and what was to be measured and was not."""
    slow = [one for one in result["left_out"] if one.endswith(": time")]
    slow += [f"{which}: nothing measured" for which in result["errors"] if not result.get(which)]

    def limit(row: dict[str, Any], name: str, value: float, *, least: bool = False) -> None:
        if value < LIMITS[name] if least else value > LIMITS[name]:
            shape = " ".join(f"{key} {row[key]}" for key in Shape._fields)
            slow.append(f"{shape}: {name} {value:.3f}")

    decode = result.get("decode", [])
    single = {(row["batch"], row["past"]): row["us"]["attention"] for row in decode if (row["group"], row["head_dim"]) == (1, 128)}
    for row in decode:
        ours, others = row["us"]["attention"], [one for one in row["peers_us"].values() if isinstance(one, float)]
        if row["kv_mb"] <= _SMALL_MB:
            limit(row, "small_us", row["us"]["rope_append_attention"])
        if row["kv_mb"] >= _LARGE_MB:
            limit(row, "of_copy", row["of_copy"]["rope_append_attention"], least=True)
            limit(row, "of_best_peer", ours / min(others) if others else math.inf)
        if (row["group"], row["head_dim"]) == (8, 128) and (row["batch"], row["past"]) in single:
            limit(row, "group_8_of_1", ours / single[row["batch"], row["past"]])
    chunks = result.get("chunks", [])
    one = {_shape(row)._replace(width=1): row["us"]["rope_append_attention"] for row in chunks if row["width"] == 1}
    for row in chunks:
        ours, others = row["us"]["attention"], [other for other in row.get("peers_us", {}).values() if isinstance(other, float)]
        step, more = one.get(_shape(row)._replace(width=1)), row["us"]["rope_append_attention"]
        if 1 < row["width"] <= 16 and step and not (row["kv_mb"] <= _SMALL_MB and more - step <= LIMITS["small_more_us"]):
            limit(row, "8_of_1" if row["width"] <= 8 else "16_of_1", more / step)
        if row["width"] > 1 and others:
            limit(row, "chunk_of_best_peer", ours / min(others))
    for row in result.get("prefill", []):
        flash = row["peers_us"].get(SDPBackend.FLASH_ATTENTION.name, "")
        if not row["past"]:
            limit(row, "of_flash", flash / row["us"]["attention"] if isinstance(flash, float) else 0.0, least=True)
    return slow


def _use_tiles(which: str, text: str) -> None:
    name, given = f"{which}_tiles", {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}
    chosen = getattr(attention_tiles, name)

    def tiles(head_dim: int, arch: str) -> dict[str, int]:
        return {**chosen(head_dim, arch), **given}

    source_variants.TILES[f"attention_{which}"] = tiles
    for module in (attention_tiles, planner):
        if hasattr(module, name):
            setattr(module, name, tiles)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--max-seconds", type=float, default=420, help="then the rest is left out")
    parser.add_argument("--only", choices=("decode", "chunks", "prefill"))
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--tiles", help="of the kernel that --only names")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "attention.json")
    arguments = parser.parse_args()
    if arguments.tiles:
        if not arguments.only:
            parser.error("--tiles needs --only")
        _use_tiles(arguments.only, arguments.tiles)
    dims = [int(dim) for dim in arguments.dims.split(",")]
    result = measure(arguments.quick, max_seconds=arguments.max_seconds, only=arguments.only, dims=dims)
    for line in {*result["exceeded"], *result["left_out"]}:
        print(f"over the limit, or left out: {line}")
    tables = {name: to_table(result[name]) for name in ("decode", "chunks", "prefill") if name in result}
    write_result(arguments.out, {**describe_environment(gpu=True), **result, **tables})
    return 1 if result["exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
