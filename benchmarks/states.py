"""The kernels of recurrent layers on a GPU, beside those of others: are they right, and how fast are they. Needs torch.

    python benchmarks/states.py [--quick] [--max-seconds 420] [--only conv|mamba2|delta_rule] [--no-others] [--out FILE]

Decode steps, against the copy bandwidth of the same run: of states read and written, and activations. Prefill, against others. States take
turns, so that none is in the L2. Everything runs in CUDA graphs. First everything is compared with float64.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))

import attention  # noqa: E402
from environment import describe_environment, to_table, write_result  # noqa: E402
from states_layers import LAYERS, Layer, Shape, make_layer, state_nbytes  # noqa: E402

import tests.kernels.causal_conv1d as conv_cases  # noqa: E402
import tests.kernels.delta_rule as delta_cases  # noqa: E402
import tests.kernels.mamba2 as mamba2_cases  # noqa: E402
from tests.kernels.recurrent import TOLERANCE, Place  # noqa: E402

#: Decode: share of the copy bandwidth from 64 MB of states read and written. Prefill: time over that of the fastest other.
LIMITS = {"of_copy": 0.85, "of_best_other": 1.0}

_LARGE_MB, _MIB = 64, 2**20
_ROTATED_NBYTES, _MAX_COPIES, _MAX_REFERENCE_TOKENS = 256 * _MIB, 128, 600
_CASES = {"conv": conv_cases, "mamba2": mamba2_cases, "delta_rule": delta_cases}

#: Sizes of layers of published models: channels and kernel; heads, head dim, state size and groups; heads, key dim, value dim, key heads.
_CONV = {"decode": [(8448, 4), (2048, 3)], "prefill": [(8448, 4), (2048, 3)]}
_MAMBA2 = [(128, 64, 128, 1), (48, 64, 128, 1), (128, 80, 128, 8), (24, 64, 256, 1)]
_DELTA = [(32, 128, 128, 16), (48, 128, 128, 16)]


def shapes(only: str | None, quick: bool) -> list[Shape]:
    """Return what is measured."""
    chosen: list[Shape] = []
    widths = (64, 512, 2048) if quick else (2, 16, 64, 128, 512, 2048, 8192)
    models = _MAMBA2[: 1 if quick else None]
    for batch in (1, 256, 1024) if quick else (1, 32, 256, 1024, 4096):
        chosen += [Shape("conv", batch, 1, sizes, state="bfloat16") for sizes in _CONV["decode"]]
    for batch in (1, 32) if quick else (1, 4, 16, 32, 64, 128):
        chosen += [Shape("mamba2", batch, 1, sizes) for sizes in models]
        chosen += [Shape("delta_rule", batch, 1, sizes) for sizes in _DELTA[: 1 if quick else None]]
    if not quick:
        chosen += [Shape("delta_rule", batch, 1, _DELTA[0], state="bfloat16") for batch in (32, 128)]
        chosen += [Shape("mamba2", batch, 1, _MAMBA2[0], state="bfloat16") for batch in (16, 64)]
    for width in widths:
        chosen += [Shape("conv", 1, width, sizes, state="bfloat16") for sizes in _CONV["prefill"]]
        chosen += [Shape("mamba2", 1, width, sizes) for sizes in models]
        chosen += [Shape("delta_rule", 1, width, sizes) for sizes in _DELTA[: 1 if quick else None]]
    chosen += [Shape("conv", 8, 1024, _CONV["prefill"][0], state="bfloat16"), Shape("mamba2", 8, 1024, _MAMBA2[0])]
    chosen.append(Shape("delta_rule", 8, 1024, _DELTA[0]))
    return [shape for shape in chosen if only in (None, shape.layer)]


def check(gpu: attention.Gpu, layers: Sequence[str]) -> int:
    """Run the cases of the tests. Returns how many there were."""
    place, count = Place(gpu.memory, gpu.stream), 0
    for layer in layers:
        for case in _CASES[layer].CASES.values():
            _CASES[layer].check(place, case)
            count += 1
    return count


def measure_ours(layer: Layer, copy: float) -> dict[str, Any]:
    """Compare with float64, and return microseconds, and the share of the copy bandwidth."""
    shape = layer.shape
    row: dict[str, Any] = {**shape._asdict(), "sizes": "x".join(map(str, shape.sizes))}
    if shape.width <= _MAX_REFERENCE_TOKENS:
        error = layer.error()
        assert error <= 2 * TOLERANCE[shape.dtype], f"{shape}: error {error:.2e}"
        row["error"] = float(f"{error:.1e}")
    least = layer.nbytes / copy
    seconds = layer.gpu.seconds(layer.calls, least)
    row |= {"state_mb": round(state_nbytes(shape) / _MIB, 2), "us": round(seconds * 1e6, 2), "limit_us": round(least * 1e6, 2)}
    return {**row, "of_copy": round(least / seconds, 3)}


def measure_others(layer: Layer, seconds: float) -> dict[str, Any]:
    """Return microseconds of others, or why there are none. The last one, in plain torch, is measured where no other one is there."""
    others: dict[str, Any] = {}
    *better, last = layer.others()
    for name, make in (*better, last):
        if name == last[0] and any(isinstance(one, float) for one in others.values()):
            break
        try:
            others[name] = round(attention._torch_seconds(make(), seconds) * 1e6, 2)
        except (RuntimeError, ImportError, OSError, TypeError, ValueError, AttributeError, AssertionError) as error:
            others[name] = f"{type(error).__name__}: {error}"[:120]
            torch.cuda.synchronize()
    return others


def measure(quick: bool, *, only: str | None, max_seconds: float, others: bool) -> dict[str, Any]:
    """Check and measure it all. What does not fit into the memory or the time is named and left out. Others come last."""
    gpu, deadline = attention.Gpu(), time.monotonic() + max_seconds
    layers = [only] if only else list(LAYERS)
    result: dict[str, Any] = {"limits": LIMITS, "other_versions": _versions(), "left_out": [], "rows": []}
    room = 0.8 * torch.cuda.get_device_properties(0).total_memory
    with torch.cuda.stream(gpu.torch_stream):
        result["checked_cases"] = check(gpu, layers)
        copy = attention._copy_bandwidth()
        result["copy_gb_per_second"] = round(copy / 1e9)

        def made(shape: Shape) -> Layer:
            gc.collect()  # the last layer, which would break off a capture if it went then
            torch.cuda.empty_cache()
            return make_layer(gpu, shape, max(1, min(_MAX_COPIES, _ROTATED_NBYTES // state_nbytes(shape)) if shape.width < 64 else 2))

        measured = []
        for shape in shapes(only, quick):
            if time.monotonic() > deadline or 2 * state_nbytes(shape) > room:
                result["left_out"].append(f"{shape}: time or memory")
                continue
            measured.append(shape)
            result["rows"].append(measure_ours(made(shape), copy))
            print(json.dumps(result["rows"][-1]), flush=True)
        for row, shape in sorted(
            zip(result["rows"], measured, strict=True), key=lambda pair: pair[1].width == 1
        ):  # those with a limit first
            if not others or time.monotonic() > deadline:
                result["left_out"].append(f"others at {shape}")
                continue
            row["others_us"] = measure_others(made(shape), row["us"] / 1e6)
            print(json.dumps(row), flush=True)
    return {**result, "exceeded": exceeded(result)}


def exceeded(result: dict[str, Any]) -> list[str]:
    """Return the limits that a result does not keep."""
    slow = []
    for row in result["rows"]:
        times = [one for one in row.get("others_us", {}).values() if isinstance(one, float)]
        name = f"{row['layer']} {row['sizes']} batch {row['batch']} width {row['width']} {row['state']}"
        if row["width"] == 1 and 2 * row["state_mb"] >= _LARGE_MB and row["of_copy"] < LIMITS["of_copy"]:
            slow.append(f"{name}: of_copy {row['of_copy']}")
        if row["width"] > 1 and times and row["us"] > LIMITS["of_best_other"] * min(times):
            slow.append(f"{name}: of_best_other {row['us'] / min(times):.2f}")
    return slow


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "mamba-ssm", "causal-conv1d", "fla-core", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few shapes")
    parser.add_argument("--max-seconds", type=float, default=420, help="then the rest is left out")
    parser.add_argument("--only", choices=list(LAYERS))
    parser.add_argument("--no-others", action="store_true", help="only ours")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "states.json")
    arguments = parser.parse_args()
    result = measure(arguments.quick, only=arguments.only, max_seconds=arguments.max_seconds, others=not arguments.no_others)
    for line in [*result["exceeded"], *result["left_out"]]:
        print(f"over the limit, or left out: {line}")
    write_result(arguments.out, {**describe_environment(gpu=True), **result, "rows": to_table(result["rows"])})
    return 1 if result["exceeded"] else 0


if __name__ == "__main__":
    sys.exit(main())
