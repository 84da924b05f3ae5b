"""Time and peak memory of building a 0.5B-parameter Qwen2-shaped engine, beside a bare TensorRT build of the same network.

    python benchmarks/build.py [--quantized] [--out benchmarks/results/build.json] [--dtype bfloat16] [--layers 24]

With ``--quantized`` the weights of these builds are rounded, to int8 and to int4. Each build runs in a process of its own, and its peak is
that of the process. Bare: the network over the weights, one call of TensorRT, nothing kept but what it returns. Ours is ``build_engine``:
the same, and the checks, the fingerprint of the checkpoint, and the engine folder on disk, which is then opened and verified.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environment import describe_environment, write_result
from random_model import QWEN2_0_5B

from trt_kvcache._util.peak_memory import peak_memory_nbytes
from trt_kvcache.builder.build_engine import build_engine
from trt_kvcache.builder.capable_gpus import with_capable_gpus
from trt_kvcache.builder.definition import define_decoder
from trt_kvcache.builder.options import BuildOptions
from trt_kvcache.builder.resolved_options import ResolvedOptions
from trt_kvcache.builder.serialization import make_config
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.engine_folder.folder import EngineFolder
from trt_kvcache.trt.module import load

SIZES = {"max_batch_size": 8, "max_sequence_length": 2048, "max_prefill_length": 512}
FLAVOUR = "tensorrt_rtx"

#: Most memory that ours may take beyond the bare build, in sizes of the weights: in 16 bits, and packed.
LIMIT, PACKED_LIMIT = 2.5, 1.5

#: Weights of linear layers, beside those in 16 bits.
ROUNDED = ("int8", "int4:128")


def bare(model, dtype, quantize):
    """Build without anything that this package adds."""
    before = peak_memory_nbytes()
    started = time.perf_counter()
    tensorrt = load(FLAVOUR)
    with Checkpoint.open(model, quantize=quantize) as checkpoint, tensorrt.log.collect(ignore_missing_driver=True) as messages:
        options = with_capable_gpus(
            ResolvedOptions.of_model(BuildOptions(**SIZES, dtype=dtype), checkpoint.config), checkpoint.value_kinds, tensorrt
        )
        definition = define_decoder(checkpoint, options, options.cache_for(checkpoint.config), tensorrt, messages)
        defined = time.perf_counter()
        config = make_config(definition, options, tensorrt, messages)
        plan = definition.builder.build_serialized_network(definition.network, config)
        return {
            "seconds": time.perf_counter() - started,
            "seconds_in_tensorrt": time.perf_counter() - defined,
            "plan_nbytes": plan.nbytes,
            "peak_nbytes": peak_memory_nbytes(),
            "nbytes_before": before,
        }


def ours(model, dtype, quantize):
    """Build an engine folder, then check what was written."""
    before = peak_memory_nbytes()
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        report = build_engine(model, Path(place) / "engine", **SIZES, dtype=dtype, flavour=FLAVOUR, quantize=quantize)
        measured = {
            "seconds": report.seconds,
            "plan_nbytes": report.plan_nbytes,
            "weights_nbytes": report.weights_nbytes,
            "peak_nbytes": report.peak_memory_nbytes,
            "nbytes_before": before,
            "decomposable_layers": sum(choice.decomposable for choice in report.attention),
            "warnings": list(report.warnings),
        }
        folder = EngineFolder.open(report.path)
        folder.read_plan().close()
        folder.open_checkpoint().close()
    return measured


def in_own_process(which, model, dtype, quantize):
    """Run one build in a fresh interpreter and return what it measured."""
    command = [sys.executable, __file__, "--run", which, "--model", str(model), "--dtype", dtype]
    command += [] if quantize is None else ["--quantize", quantize]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def both(model, dtype, quantize=None):
    """Build both ways, and return the results with what ours takes beyond the bare build."""
    results = {which: in_own_process(which, model, dtype, quantize) for which in ("bare", "ours")}
    if results["bare"]["plan_nbytes"] != results["ours"]["plan_nbytes"]:
        raise AssertionError(f"the two builds made different engines: {results}")
    weights = results["ours"]["weights_nbytes"]
    beyond = (results["ours"]["peak_nbytes"] - results["bare"]["peak_nbytes"]) / weights
    for which, result in results.items():
        peak, plan = (result[name] / 2**20 for name in ("peak_nbytes", "plan_nbytes"))
        print(f"{quantize or dtype:8} {which:5} {result['seconds']:6.1f} s  peak {peak:7.0f} MiB  plan {plan:.0f} MiB")
    print(f"beyond the bare build: {beyond:.2f} times the weights of {weights / 2**20:.0f} MiB", flush=True)
    return results, beyond


def main():
    """Measure, print, write the file; 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description="Time and peak memory of an engine build")
    parser.add_argument("--out", type=Path, help="default: build.json, or build_packed.json, in benchmarks/results")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=QWEN2_0_5B["num_hidden_layers"])
    parser.add_argument("--run", choices=("bare", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantize", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps({"bare": bare, "ours": ours}[arguments.run](arguments.model, arguments.dtype, arguments.quantize)))
        return 0

    description = {"model": {**QWEN2_0_5B, "num_hidden_layers": arguments.layers}, "dtype": arguments.dtype, **SIZES}
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        model = write_random_model(Path(place) / "model", description["model"])
        found = {quantize: both(model, arguments.dtype, quantize) for quantize in (ROUNDED if arguments.quantized else (None,))}
    rows = {quantize: {"results": results, "peak_beyond_bare_in_weights": beyond} for quantize, (results, beyond) in found.items()}
    limit = PACKED_LIMIT if arguments.quantized else LIMIT
    content = {**describe_environment(), **description, **({"packed": rows} if arguments.quantized else rows[None]), "limit": limit}
    name = "build_packed.json" if arguments.quantized else "build.json"
    write_result(arguments.out or Path(__file__).parent / "results" / name, content)
    return int(any(beyond > limit for _, beyond in found.values()))


if __name__ == "__main__":
    sys.exit(main())
