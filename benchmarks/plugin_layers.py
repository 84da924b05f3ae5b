"""Builds of plugin attention with TensorRT for RTX: one plan with plugin layers, beside a plan for each segment, and native attention.

    python benchmarks/plugin_layers.py [--out benchmarks/results/plugin_layers.json] [--dtype bfloat16] [--layers 24]

A model of the shape of Qwen2-0.5B with random weights. Each build runs in a process of its own, and its peak is that of the process. None
of these engines has run on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from environment import describe_environment, write_result
from random_model import QWEN2_0_5B

from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.engine_folder.folder import EngineFolder

SIZES = {"max_batch_size": 8, "max_sequence_length": 2048, "max_prefill_length": 512}
ONE_PLAN, SEGMENTS = {"attention": "plugin"}, {"attention": "plugin", "plugin_layers": "segments"}

#: Builds that are compared, by name.
BUILDS = {
    "native": {"attention": "native"},
    "one plan": ONE_PLAN,
    "segments": SEGMENTS,
    "one plan, int8 K and V": {**ONE_PLAN, "kv_dtype": "int8"},
    "segments, int8 K and V": {**SEGMENTS, "kv_dtype": "int8"},
}


def measure(model, dtype, name):
    """Build an engine folder in this process, and open it."""
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        report = build_engine(model, Path(place) / "engine", **SIZES, dtype=dtype, flavour="tensorrt_rtx", **BUILDS[name])
        segments = EngineFolder.open(report.path).config.segments
        return {
            "seconds": report.seconds,
            "peak_nbytes": report.peak_memory_nbytes,
            "plan_nbytes": report.plan_nbytes,
            "constants_nbytes": 0 if segments is None else segments.constants.nbytes,
            "plans": 1 if segments is None else len(segments.plans),
            "weights_nbytes": report.weights_nbytes,
        }


def main():
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description="Builds of plugin attention: one plan, and segments")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plugin_layers.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=QWEN2_0_5B["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=QWEN2_0_5B["vocab_size"])
    parser.add_argument("--run", choices=tuple(BUILDS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(arguments.model, arguments.dtype, arguments.run)))
        return
    config = {**QWEN2_0_5B, "num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab_size}
    rows, load = [], os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        model = write_random_model(Path(place) / "model", config)
        for name in BUILDS:
            command = [sys.executable, __file__, "--run", name, "--model", str(model), "--dtype", arguments.dtype]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows.append({"build": name, **json.loads(output.splitlines()[-1])})
            row = rows[-1]
            peak, plan, constants = (row[f"{what}_nbytes"] / 2**20 for what in ("peak", "plan", "constants"))
            sizes = f"peak {peak:7.0f} MiB  plan {plan:6.0f} MiB  constants {constants:4.0f} MiB  {row['plans']} plans"
            print(f"{name:24} {row['seconds']:6.1f} s  {sizes}", flush=True)
    write_result(
        arguments.out, {**describe_environment(), "model": config, "dtype": arguments.dtype, **SIZES, "load_average": load, "rows": rows}
    )


if __name__ == "__main__":
    main()
