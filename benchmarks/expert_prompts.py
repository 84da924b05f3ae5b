"""Products of the rows of a prompt with their experts: are they right, and how fast beside torch's grouped products. Needs torch and a GPU.

    python benchmarks/expert_prompts.py [--quick] [--max-seconds 60]

``tiles``: the kernels of this package, which read packed weights as they are stored. ``grouped``: the same weights in 16 bits, and
``torch.nn.functional.grouped_mm``, which the engine takes itself for 16 bits and many rows. All sort, multiply and add up. A time is
the median of several calls, between events, on an idle GPU. The least time is that of reading all chosen experts once, or of multiplying at
the speed that torch's largest product reaches here, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention import Gpu, _copy_bandwidth
from environment import describe_environment, to_table, write_result
from experts import GPT_OSS, INT4, INT8, MIXTRAL, PLAIN, QWEN, Format, Layers, relative_error

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

from trt_kvcache.kernels.linear_tiles import EXPONENTS  # noqa: E402
from trt_kvcache.torch_engine.device_views import DeviceViews  # noqa: E402
from trt_kvcache.torch_engine.experts import SortedProducts  # noqa: E402
from trt_kvcache.torch_engine.grouped_experts import GroupedProducts  # noqa: E402
from trt_kvcache.torch_engine.operations import Elementwise, ExpertProducts, Experts, Projections, dense  # noqa: E402
from trt_kvcache.torch_engine.packed_stack import MatrixStack  # noqa: E402
from trt_kvcache.torch_engine.tiled_experts import TiledExperts  # noqa: E402

CASES = (
    *((QWEN, PLAIN), (QWEN, INT4), (QWEN, INT8), (GPT_OSS, Format("MXFP4", "e2m1", EXPONENTS)), (GPT_OSS, PLAIN)),
    *((MIXTRAL, PLAIN), (MIXTRAL, INT4)),
)
#: Of these, the ones that ``--quick`` takes, and rows.
_QUICK, ROWS, _QUICK_ROWS = 4, (16, 64, 256, 1024, 4096), (16, 1024)

#: Largest difference of two sides, relative to the largest result: products and activations are rounded to bfloat16.
_TOLERANCE = 2**-5

_REPEATS, _WARM_UP = 9, 2


def seconds(call: Callable[[int], object], steps: int) -> float:
    """Return the median time of a call on the current stream."""
    times = []
    for repeat in range(_WARM_UP + _REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host enqueues while the GPU waits
        start.record()
        call(repeat % steps)
        end.record()
        end.synchronize()
        if repeat >= _WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def peak_flops() -> float:
    """Return the multiplications and additions per second of a large product of torch."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds(lambda _: a @ b, 1)


def in_16_bits(matrices: MatrixStack) -> torch.Tensor:
    """Return matrices ``[count, outputs, inputs]`` in 16 bits."""
    return matrices if isinstance(matrices, torch.Tensor) else torch.stack([dense(one) for one in matrices])


def rows_of(layers: Layers, in_16: list[Experts], rows: int, copy: float, flops: float) -> dict[str, Any]:
    """Check and measure a number of rows."""
    gpu, model = layers.gpu, layers.model
    elementwise, views, stream = Elementwise(), DeviceViews(gpu.memory), gpu.stream
    x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device="cuda").normal_()
    weights, chosen = torch.rand(rows, model.choices, device="cuda") + 0.1, layers.choices(rows)
    by_expert = SortedProducts(Projections(elementwise))
    grouped = GroupedProducts(by_expert, elementwise)
    sides: dict[str, ExpertProducts] = {"tiles": TiledExperts(grouped, elementwise, views, stream), "grouped": grouped}
    layer_of = dict.fromkeys(sides, layers.of_step) | {"grouped": lambda step: in_16[step % len(in_16)]}
    found = {name: side(x, chosen[0], weights, layer_of[name](0)) for name, side in sides.items()}
    errors = {name: relative_error(found[name], found["grouped"].double()) for name in sides if name != "grouped"}
    for name, error in errors.items():
        assert error <= _TOLERANCE, f"{model.name} in {layers.stored.name}, {rows} rows: {name} differs by {error:.2e}"
    times = {
        name: seconds(lambda step, side=side, of=layer_of[name]: side(x, chosen[step], weights, of(step)), len(chosen))
        for name, side in sides.items()
    }
    read = sum(len(one.unique()) for one in chosen) / len(chosen)
    nbytes = read * (layers.nbytes(layers.layers[0].inputs) + layers.nbytes(layers.layers[0].down))
    operations = 2 * rows * model.choices * (model.width + model.intermediate) * model.hidden
    least = max(nbytes / copy, operations / flops)
    return {
        "model": model.name,
        "format": layers.stored.name,
        "rows": rows,
        "us": {name: round(one * 1e6, 1) for name, one in times.items()},
        "least_us": round(least * 1e6, 1),
        "of_least": {name: round(least / one, 3) for name, one in times.items()},
        "error": float(f"{max(errors.values()):.1e}"),
    }


def measure(gpu: Gpu, copy: float, flops: float, options: argparse.Namespace) -> dict[str, Any]:
    """Check and measure what there is time for; what there is not is named."""
    deadline, found, left_out = time.monotonic() + options.max_seconds, [], []
    for model, stored in CASES[:_QUICK] if options.quick else CASES:
        name = f"{model.name} in {stored.name}"
        if time.monotonic() > deadline:
            left_out.append(name)
            continue
        layers = Layers(gpu, model, stored)
        in_16 = [replace(one, inputs=in_16_bits(one.inputs), down=in_16_bits(one.down)) for one in layers.layers]
        for rows in _QUICK_ROWS if options.quick else ROWS:
            if time.monotonic() > deadline:
                left_out.append(f"{name}, {rows} rows")
                continue
            row = rows_of(layers, in_16, rows, copy, flops)
            print(json.dumps(row), flush=True)
            found.append(row)
        del layers, in_16
        torch.cuda.empty_cache()
    return {"left_out": left_out, "rows": to_table(found)}


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cases, 16 and 1024 rows")
    parser.add_argument("--max-seconds", type=float, default=60, help="then the rest is left out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "expert_prompts.json")
    options = parser.parse_args()
    gpu = Gpu()
    with torch.cuda.stream(gpu.torch_stream), torch.inference_mode():
        copy, flops = _copy_bandwidth(), peak_flops()
        print(json.dumps({"copy_gb_per_second": round(copy / 1e9), "tflops": round(flops / 1e12)}), flush=True)
        result = measure(gpu, copy, flops, options)
    content = {"copy_gb_per_second": round(copy / 1e9), "tflops": round(flops / 1e12), **result}
    write_result(options.out, {**describe_environment(gpu=True), **content})
    return 1 if result["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
