"""One new token, and a few, over quantized caches on a GPU, beside the same over 16 bits: is it right, and how fast is it. Needs torch.

    python benchmarks/attention_quantized_decode.py [--quick] [--max-seconds 150] [--tiles STAGES=4,...]

Time is that of RoPE, append and attention, in CUDA graphs. Caches and their scales take turns, so that none is in L2. The limit is the
time in which the GPU copies as many bytes as K, V and scales have. ``--tiles`` tries other tiles in the kernels over quantized caches.

FlashInfer, where it is installed, attends over K and V in FP8 with one scale for all, in pages. It neither applies RoPE nor appends, and
the scale of V, which it applies in a launch of its own, is left out. Ours beside it, ``append_attention_us``, is FP8 with a scale for each
head: append and attention, without RoPE.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attention import Call, Gpu, Shape, _copy_bandwidth, measure_peers
from attention_flashinfer import paged_calls
from attention_peers import peer_versions
from attention_quantized_cache import device_tensor, largest_error
from environment import describe_environment, to_table, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from tests.kernels import attention as cases  # noqa: E402
from trt_kvcache.dtypes import SCALED_KV_DTYPES  # noqa: E402
from trt_kvcache.kernels import (  # noqa: E402
    AttentionWorkspace,
    attend,
    attention_tiles,
    decode_plan as planner,
    source_variants,
)
from trt_kvcache.memory.shapes import dense_nbytes  # noqa: E402

#: Share of the copy bandwidth, from so many MB of K, V and scales. How many times as fast as over 16 bits, from 128 MB of those. Time over
#: that of FlashInfer's fastest (runs differ by 2 %).
LIMITS = {"of_copy": 0.85, "of_16_bits": 1.7, "of_best_peer": 1.02}
_LARGE_MB, _LARGE_16_MB = 64, 128

#: K/V dtype and scales of each row; the first one is 16 bits.
KINDS = (("float16", "none"), ("float8_e4m3fn", "head"), ("float8_e4m3fn", "token"), ("int8", "head"), ("int8", "token"))

#: That of :data:`KINDS` which others have too, with one scale for all; and how far their results may be from the reference.
PEER_KIND, PEER_SCALE, PEER_TOLERANCE = KINDS[1], 3 / SCALED_KV_DTYPES["float8_e4m3fn"], 1e-2

_ROTATED_NBYTES, _MIB = 256 * 2**20, 2**20  # of all caches that take turns: several times an L2


def shapes(quick: bool) -> list[Shape]:
    """Return what is measured: one new token, then a few."""
    one = [(1, 1, 1024), (1, 1, 8192), (1, 1, 32768), (8, 1, 8192), (8, 1, 32768)]
    few = [(1, 2, 32768), (1, 8, 32768), (8, 4, 8192)]
    if quick:
        return [Shape(*each, 4, 128) for each in (*one, *few)]
    models = [Shape(*each, *model) for model in ((4, 128), (8, 128), (4, 64), (4, 256)) for each in (*one, (32, 1, 8192))]
    return models + [Shape(*each, *model) for model in ((4, 128), (4, 64), (2, 256)) for each in few]


class Problem:
    """A shape over a kind of cache: tensors, and calls over caches that take turns."""

    def __init__(self, gpu: Gpu, shape: Shape, kv_dtype: str, scales: str, dtype: str = "float16", copies: int | None = None) -> None:
        batch, width, past, group, dim, kv_heads = shape
        tokens, heads = past + width, kv_heads * group
        row, per_token = (batch, 2, kv_heads, tokens, dim), (batch, 2, kv_heads, -(-tokens // 4) * 4)
        self.nbytes = dense_nbytes(row, kv_dtype if scales != "none" else dtype) + (
            4 * batch * 2 * kv_heads * tokens if scales == "token" else 0
        )
        copies = copies or max(1, min(64, -(-_ROTATED_NBYTES // self.nbytes)))
        workspace = AttentionWorkspace(gpu.memory, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, stream=gpu.stream)
        (q, self.q), (out, self.out) = (device_tensor(gpu, (batch, width, heads, dim), dtype) for _ in range(2))
        (k, self.k), (v, self.v) = (device_tensor(gpu, (batch, width, kv_heads, dim), dtype) for _ in range(2))
        lengths, self.lengths = device_tensor(gpu, (batch,), "int32")
        table, angles = gpu.tensor((tokens, 2, dim // 2), "float32")
        angles[:, 0], angles[:, 1] = 1, 0
        self.lengths.fill_(past)
        for one in (self.q, self.k, self.v):
            one.normal_()
        self.calls: list[Callable[[Any], object]] = []
        self.without_rope: list[Callable[[Any], object]] = []
        self.caches: list[Any] = []
        self.scales = None
        values = torch.randn(row, device="cuda", dtype=torch.float16)
        if scales != "none":
            values = (values * (SCALED_KV_DTYPES[kv_dtype] / 4)).round().clamp(-127, 127)
        for _ in range(copies):
            cache, codes = device_tensor(gpu, row, kv_dtype if scales != "none" else dtype)
            codes.copy_(values)
            options: dict[str, Any] = {"cos_sin": table, "out": out, "workspace": workspace}
            if scales != "none":
                options["kv_scales"], factors = device_tensor(gpu, per_token if scales == "token" else (2, kv_heads), "float32")
                factors.uniform_(2 / SCALED_KV_DTYPES[kv_dtype], 4 / SCALED_KV_DTYPES[kv_dtype])
                self.scales = self.scales if self.caches else factors
            self.caches.append(codes)
            call = partial(attend, q, k, v, cache, lengths, **options)
            self.calls.append(lambda stream, call=call: call(stream=stream))
            self.without_rope.append(lambda stream, call=call: call(cos_sin=None, stream=stream))

    def error(self) -> float:
        """Return :func:`~attention_quantized_cache.largest_error` of the last call."""
        return largest_error(self.out, self.q, self.caches[0], self.scales, self.lengths)


_CHECKED = [
    *((5, 1, 40000, 4, 128), (3, 1, 9000, 16, 256), (70, 1, 3000, 8, 64), (1, 1, 131000, 8, 96), (4, 1, 6000, 7, 80)),
    *((1, 2, 40000, 7, 128), (3, 8, 9000, 2, 256), (9, 4, 3000, 8, 64)),
]


def check(gpu: Gpu) -> dict[str, float]:
    """Compare large shapes with ragged lengths over each kind of cache; dead rows are NaN. Returns the largest error for each dtype."""
    errors: dict[str, float] = {}
    for dtype, tolerance in cases.TOLERANCE.items():
        for shape in _CHECKED:
            for kind in KINDS[1:]:
                problem = Problem(gpu, Shape(*shape), *kind, dtype=dtype, copies=1)
                problem.lengths.copy_(torch.randint(0, shape[2] + 1, (shape[0],), device="cuda"))
                for slot, length in enumerate(problem.lengths.tolist()):
                    problem.caches[0].view(torch.uint8)[slot, :, :, length:] = 0x7F
                    if kind[1] == "token" and problem.scales is not None:
                        problem.scales[slot, :, :, length:] = torch.nan
                for _ in range(2):
                    problem.calls[0](gpu.stream)
                error = problem.error()
                assert error <= tolerance, f"{dtype}, {kind}, {shape}: error {error:.2e}"
                errors[dtype] = max(errors.get(dtype, 0.0), float(f"{error:.2e}"))
                del problem
                torch.cuda.empty_cache()
    return errors


def measure(gpu: Gpu, shape: Shape, copy: float) -> dict[str, Any]:
    """Return the microseconds of a shape over each kind of cache, their share of the copy bandwidth, and how much faster they are."""
    times: dict[str, float] = {}
    megabytes, shares = {}, {}
    for kind in KINDS:
        problem, name = Problem(gpu, shape, *kind), "16 bits" if kind == KINDS[0] else " ".join(kind)
        times[name] = gpu.seconds(problem.calls, problem.nbytes / copy)
        megabytes[name] = round(problem.nbytes / _MIB, 1)
        shares[name] = round(problem.nbytes / copy / times[name], 3)
        if kind == PEER_KIND:
            without_rope = gpu.seconds(problem.without_rope, problem.nbytes / copy)
        del problem
        torch.cuda.empty_cache()
    return {
        **shape._asdict(),
        "kv_mb": megabytes,
        "us": {name: round(one * 1e6, 2) for name, one in times.items()},
        "append_attention_us": round(without_rope * 1e6, 2),
        "of_copy": shares,
        "faster_than_16_bits": {name: round(times["16 bits"] / one, 2) for name, one in times.items() if name != "16 bits"},
    }


def peers(problem: Problem) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """Yield names of others, as far as they are installed, and what makes their calls: one for each cache, after a look at the first."""
    if not find_spec("flashinfer"):
        return
    both = [(codes[:, 0], codes[:, 1]) for codes in problem.caches]
    scales = torch.full((2, both[0][0].shape[1]), PEER_SCALE, device=problem.q.device)

    def flash_infer(**options: Any) -> list[Call]:
        calls = paged_calls(problem.q, both, k_scale=PEER_SCALE, **options)
        out = (calls[0]() * PEER_SCALE).view(problem.q.shape)
        error = largest_error(out, problem.q, problem.caches[0], scales, problem.lengths)
        assert error <= PEER_TOLERANCE, f"error {error:.2e}"
        return list(calls)

    yield "flashinfer", flash_infer
    yield "flashinfer_heads_first", partial(flash_infer, layout="HND")
    if problem.q.shape[1] == 1:
        yield "flashinfer_cuda_cores", partial(flash_infer, tensor_cores=False)


def exceeded(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the limits that rows do not keep."""
    slow = []
    for row in rows:
        shape = " ".join(f"{key} {row[key]}" for key in Shape._fields)
        for name, faster in row["faster_than_16_bits"].items():
            if row["kv_mb"][name] >= _LARGE_MB and row["of_copy"][name] < LIMITS["of_copy"]:
                slow.append(f"{shape}: {name} {row['of_copy'][name]:.3f} of copy")
            if row["kv_mb"]["16 bits"] >= _LARGE_16_MB and faster < LIMITS["of_16_bits"]:
                slow.append(f"{shape}: {name} {faster:.2f} times as fast as 16 bits")
        others = {name: one for name, one in row.get("peers_us", {}).items() if isinstance(one, float)}
        if others and row["append_attention_us"] > LIMITS["of_best_peer"] * min(others.values()):
            best = min(others, key=lambda name: others[name])
            slow.append(f"{shape}: {' '.join(PEER_KIND)} {row['append_attention_us'] / others[best]:.3f} of the time of {best}")
    return slow


def _use_tiles(text: str) -> None:
    given = {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}
    for source, name in (("attention_decode", "decode_tiles"), ("attention_decode_few", "few_tiles")):
        chosen = getattr(attention_tiles, name)

        def tiles(head_dim: int, arch: str, *, quantized: bool = False, chosen: Any = chosen) -> dict[str, int]:
            return {**chosen(head_dim, arch, quantized=quantized), **(given if quantized else {})}

        setattr(planner, name, tiles)
        source_variants.QUANTIZED_TILES[source] = lambda head_dim, arch, tiles=tiles: tiles(head_dim, arch, quantized=True)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--max-seconds", type=float, default=150, help="then the rest is left out")
    parser.add_argument("--tiles", help="of the kernels over quantized caches")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "attention_quantized_decode.json")
    arguments = parser.parse_args()
    if arguments.tiles:
        _use_tiles(arguments.tiles)
    gpu, deadline, rows, left_out = Gpu(), time.monotonic() + arguments.max_seconds, [], []
    with torch.cuda.stream(gpu.torch_stream):
        errors, copy = check(gpu), _copy_bandwidth()
        print(json.dumps({"errors": errors, "copy_gb_per_second": round(copy / 1e9)}), flush=True)
        for shape in shapes(arguments.quick):
            if time.monotonic() > deadline:
                left_out.append(str(shape))
                continue
            rows.append(measure(gpu, shape, copy))
            print(json.dumps(rows[-1]), flush=True)
        for row in rows if find_spec("flashinfer") else []:  # last, since each launch takes longer once their kernels are loaded
            shape = Shape(*(row[key] for key in Shape._fields))
            if time.monotonic() > deadline:
                left_out.append(f"others at {shape}")
                continue
            problem = Problem(gpu, shape, *PEER_KIND)
            row["peers_us"] = measure_peers(peers(problem), problem.nbytes / copy)
            print(json.dumps(row), flush=True)
            del problem
            torch.cuda.empty_cache()
    result = {
        "errors": errors,
        "copy_gb_per_second": round(copy / 1e9),
        "peer_versions": peer_versions(),
        "limits": LIMITS,
        "dtype": "float16",
    }
    result |= {"left_out": left_out, "exceeded": exceeded(rows)}
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    write_result(arguments.out, {**describe_environment(gpu=True), **result, "rows": to_table(rows)})
    return 1 if result["exceeded"] or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
