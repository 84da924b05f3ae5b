"""Several new tokens over a quantized cache on a GPU, beside the same over 16 bits: is it right, and how fast is it. Needs torch.

    python benchmarks/attention_quantized_prefill.py [--quick] [--tiles STAGES_WHOLE=2,...]

Prefill from the start, and chunks over a past. Time is that of append and attention, without RoPE, in CUDA graphs over caches that take
turns. ``--tiles`` tries other tiles in the kernels over quantized caches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attention import Gpu, Shape
from attention_quantized_cache import device_tensor, largest_error
from environment import describe_environment, to_table, write_result

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from tests.kernels import attention as cases  # noqa: E402
from trt_kvcache.dtypes import SCALED_KV_DTYPES  # noqa: E402
from trt_kvcache.kernels import AttentionWorkspace, attend, attention_tiles, source_variants  # noqa: E402
from trt_kvcache.memory.shapes import dense_nbytes  # noqa: E402

#: Time over that with 16 bits: from the start, for so many tokens and more; and over a past.
LIMITS = {"prefill": 1.1, "chunk": 1 / 0.7}
_LIMITED_WIDTH = 2048

#: K/V dtype and scales of each row; the first one is 16 bits.
KINDS = (("float16", "none"), ("float8_e4m3fn", "token"), ("int8", "token"), ("float8_e4m3fn", "head"))

_LARGEST_BUFFERS = 256 * 2**20  # bytes of all caches that take turns: several times an L2


def shapes(quick: bool) -> list[Shape]:
    """Return what is measured: prompts, then chunks."""
    heads = [(4, 128)] if quick else [(4, 128), (4, 64), (4, 256)]
    prompts = [Shape(1, width, 0, *one) for one in heads for width in ((2048,) if quick else (512, 2048, 8192))]
    chunks = [(1, 16, 8192), (1, 64, 32768), (8, 32, 8192)] if quick else [(1, 16, 8192), (1, 16, 32768), (1, 64, 2048), (1, 64, 32768)]
    more = [] if quick else [(1, 512, 8192), (8, 16, 8192), (8, 128, 8192)]
    return prompts + [Shape(batch, width, past, *heads[0]) for batch, width, past in chunks + more] + [Shape(1, 16, 8192, *heads[-1])]


class Problem:
    """A shape over a kind of cache: tensors, and calls over caches that take turns."""

    def __init__(self, gpu: Gpu, shape: Shape, kv_dtype: str, scales: str) -> None:
        batch, width, past, group, dim, kv_heads = shape
        tokens, heads = past + width, kv_heads * group
        row = (batch, 2, kv_heads, tokens, dim)
        copies = max(1, min(16, _LARGEST_BUFFERS // dense_nbytes(row, kv_dtype)))
        workspace = AttentionWorkspace(gpu.memory, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, stream=gpu.stream)
        (q, self.q), (out, self.out) = (device_tensor(gpu, (batch, width, heads, dim), "float16") for _ in range(2))
        (k, self.k), (v, self.v) = (device_tensor(gpu, (batch, width, kv_heads, dim), "float16") for _ in range(2))
        lengths, self.lengths = device_tensor(gpu, (batch,), "int32")
        self.lengths.fill_(past)
        for one in (self.q, self.k, self.v):
            one.normal_()
        made = [device_tensor(gpu, row, kv_dtype) for _ in range(copies)]
        self.cache, self.scales, options = made[0][1], None, {}
        if scales != "none":
            per_token = (batch, 2, kv_heads, -(-tokens // 4) * 4)
            kv_scales, self.scales = device_tensor(gpu, per_token if scales == "token" else (2, kv_heads), "float32")
            self.scales.fill_(4 / SCALED_KV_DTYPES[kv_dtype])
            options = {"kv_scales": kv_scales}
        for _, cache in made:
            values = torch.randn(row, device="cuda", dtype=torch.float16)
            cache.copy_(values if scales == "none" else (values * (SCALED_KV_DTYPES[kv_dtype] / 4)).round().clamp(-127, 127))
        self.calls: list[Callable[[Any], object]] = [
            lambda stream, c=cache: attend(q, k, v, c, lengths, out=out, workspace=workspace, stream=stream, **options) for cache, _ in made
        ]

    def error(self) -> float:
        """Return :func:`~attention_quantized_cache.largest_error` of the last call."""
        return largest_error(self.out, self.q, self.cache, self.scales, self.lengths)


def check(gpu: Gpu) -> float:
    """Compare large shapes over each kind of cache; returns the largest error."""
    worst = 0.0
    for shape in ((2, 700, 2100, 4, 128), (3, 40, 5000, 4, 128), (1, 17, 9000, 2, 256), (2, 600, 77, 4, 64), (2, 300, 900, 2, 80)):
        for kind in KINDS[1:]:
            problem = Problem(gpu, Shape(*shape), *kind)
            for _ in range(2):
                problem.calls[0](gpu.stream)
            error = problem.error()
            assert error <= cases.TOLERANCE["float16"], f"{kind}, {shape}: error {error:.2e}"
            worst = max(worst, error)
    return worst


def measure(gpu: Gpu, shape: Shape) -> dict[str, Any]:
    """Return the microseconds of a shape over each kind of cache, and what share of that with 16 bits it is."""
    times = {}
    for kind in KINDS:
        problem = Problem(gpu, shape, *kind)
        times["16 bits" if kind == KINDS[0] else " ".join(kind)] = gpu.seconds(problem.calls, 2e-5) * 1e6
        del problem
        torch.cuda.empty_cache()
    first = next(iter(times.values()))
    return {
        **shape._asdict(),
        "us": {name: round(one, 2) for name, one in times.items()},
        "of_16_bits": {name: round(one / first, 3) for name, one in times.items() if name != "16 bits"},
    }


def exceeded(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the limits that rows do not keep."""
    slow = []
    for row in rows:
        limit = LIMITS["chunk"] if row["past"] else LIMITS["prefill"] if row["width"] >= _LIMITED_WIDTH else float("inf")
        shape = " ".join(f"{key} {row[key]}" for key in Shape._fields)
        slow += [f"{shape}: {name} {share:.3f} of 16 bits" for name, share in row["of_16_bits"].items() if share > limit]
    return slow


def _use_tiles(text: str) -> None:
    given = {name: int(value) for name, value in (pair.split("=") for pair in text.split(","))}
    chosen = attention_tiles.quantized_prefill_tiles

    def tiles(head_dim: int, arch: str) -> dict[str, int]:
        return {**chosen(head_dim, arch), **given}

    attention_tiles.quantized_prefill_tiles = source_variants.QUANTIZED_TILES["attention_prefill"] = tiles  # type: ignore[assignment]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--tiles", help="of the kernels over quantized caches")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "attention_quantized_prefill.json")
    arguments = parser.parse_args()
    if arguments.tiles:
        _use_tiles(arguments.tiles)
    gpu = Gpu()
    with torch.cuda.stream(gpu.torch_stream):
        worst = check(gpu)
        rows = []
        for shape in shapes(arguments.quick):
            rows.append(measure(gpu, shape))
            print(json.dumps(rows[-1]), flush=True)
    result = {"error": float(f"{worst:.2e}"), "limits": LIMITS, "dtype": "float16", "exceeded": exceeded(rows)}
    for line in result["exceeded"]:
        print(f"over the limit: {line}")
    write_result(arguments.out, {**describe_environment(gpu=True), **result, "rows": to_table(rows)})
    return 1 if result["exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
