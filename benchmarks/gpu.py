"""Everything that only a GPU can show, in one command: what it accepts, whether it computes right, how fast it is.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json] [--tests] [--large]

First ``trt-kvcache doctor``, then what needs the files of a checkout: benchmarks, and with ``--tests`` the tests that need a GPU.
Each stage prints one line and never stops the later ones. Exit code 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moves
import numpy as np
from environment import describe_environment, write_result
from random_model import QWEN2_0_5B

from trt_kvcache import InferenceSession, build_engine
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.errors import KVCacheError
from trt_kvcache.memory.cuda_memory import find_gpu

ROOT = Path(__file__).resolve().parent.parent


class Report:
    """Results of the stages, by name."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}

    def run(self, name: str, stage: Callable[[], Any]) -> None:
        """Run a stage; its failure is a result."""
        started = time.perf_counter()
        try:
            result, ok = stage(), True
        except (
            KVCacheError,
            AssertionError,
            ImportError,
            OSError,
            ValueError,
            RuntimeError,
            TypeError,
            subprocess.SubprocessError,
        ) as error:
            result, ok = f"{type(error).__name__}: {error}", False
        seconds = round(time.perf_counter() - started, 3)
        self.stages[name] = {"ok": ok, "seconds": seconds, "result": result}
        print(f"{'ok  ' if ok else 'FAIL'} {name} ({seconds} s): {json.dumps(result, default=str)[:400]}", flush=True)

    @property
    def ok(self) -> bool:
        """Whether every stage passed."""
        return all(stage["ok"] for stage in self.stages.values())


def doctor(scratch: Path) -> dict[str, Any]:
    """Run ``trt-kvcache doctor``; a failed check fails the stage, with its name."""
    out = scratch / "doctor.json"
    subprocess.run([sys.executable, "-m", "trt_kvcache.doctor", "-o", out], cwd=ROOT, check=False)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    failed = [f"{check['letter']} {check['title']}" for check in found["checks"] if check["status"] == "failed"]
    assert not failed, f"failed: {', '.join(failed)}"
    return found


def build(model: Path, folder: Path, dtype: str, attention: str, batch: int, length: int = 256) -> dict[str, Any]:
    """Build an engine folder."""
    report = build_engine(
        model,
        folder,
        max_batch_size=batch,
        max_sequence_length=length,
        max_prefill_length=min(64, length),
        dtype=dtype,
        attention=attention,
    )
    return {"plan_nbytes": report.plan_nbytes, "seconds": round(report.seconds, 2), "tensorrt": report.tensorrt}


def decode_speed(folder: Path, batch: int, steps: int, weights_nbytes: int) -> dict[str, Any]:
    """Measure decode steps of a random prompt; beside it, the time that reading the weights once takes at copy speed."""
    rng = np.random.default_rng(0)
    with InferenceSession.open(folder, engine="tensorrt") as session:
        prompts = [rng.integers(0, session.vocab_size, 32).tolist() for _ in range(batch)]
        tokens = session.prefill(prompts).argmax(axis=1).tolist()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            tokens = session.decode(tokens).argmax(axis=1).tolist()
            times.append(time.perf_counter() - started)
    median = float(np.median(times[steps // 4 :]))
    return {
        "batch": batch,
        "median_step_ms": round(median * 1e3, 3),
        "tokens_per_second": round(batch / median, 1),
        "weights_nbytes": weights_nbytes,
        "weights_gb_per_second": round(weights_nbytes / median / 1e9, 1),
    }


def gpu_tests() -> str:
    """Run the tests that need a GPU; a missing one is a failure."""
    environment = {**os.environ, "TRT_KVCACHE_REQUIRE_GPU": "1", "TRT_KVCACHE_TEST_DEVICE": "gpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-m", "gpu or device", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout.strip().splitlines()[-1]


def sanitized(tool: str) -> dict[str, str]:
    """Run the tests of the kernels under a tool of compute-sanitizer, in a process for each file: in one, memcheck takes many minutes."""
    environment = {**os.environ, "TRT_KVCACHE_REQUIRE_GPU": "1", "TRT_KVCACHE_TEST_DEVICE": "gpu"}
    shown = {}
    for name in ("attention", "compaction", "cuda", "infos", "kv_copies", "lengths", "ptx", "refused", "state_rows"):
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        command += [sys.executable, "-m", "pytest", "-q", "-m", "device and not slow", "-p", "no:cacheprovider"]
        command += [f"tests/kernels/test_{name}.py"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout[-2000:]
        shown[name] = " ".join(line for line in done.stdout.splitlines() if " passed" in line or "SUMMARY" in line)
    return shown


def moves_on_the_gpu() -> dict[str, Any]:
    """Measure what moves bytes: see ``moves.py``. A limit that is exceeded fails the stage, after all was measured."""
    result = moves.measure(moves.DeviceClock(), max_bytes=100e9)
    return {**moves.tabled(result), "exceeded": moves.exceeded(result, moves.LIMITS["gpu"])}


def attention_on_the_gpu() -> dict[str, Any]:
    """Check attention, and name the limits that a few shapes exceed; ``attention.py`` measures and records all."""
    import attention

    result = attention.measure(quick=True)
    return {name: result[name] for name in ("errors", "copy_gb_per_second", "exceeded")}


def attention_in_a_transformers_model() -> dict[str, Any]:
    """Generate on our cache and attention in a torch model, and compare with its own SDPA: see ``hf_cache.py``."""
    import hf_cache

    return hf_cache.hf_adapter()


def host_time_of_segments(scratch: Path) -> dict[str, Any]:
    """Measure segments that do nothing, in a process of its own: see ``segments.py``."""
    out = scratch / "segments.json"
    subprocess.run([sys.executable, ROOT / "benchmarks" / "segments.py", "--out", out], check=True, capture_output=True, timeout=300)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {name: result[name] for name in ("launches", "eager_us", "eager_us_per_layer", "graph_us")}


def measure(arguments: argparse.Namespace, report: Report, scratch: Path) -> None:
    """Run all stages, correctness first."""
    report.run("doctor", lambda: doctor(scratch))
    report.run("cache: compaction, capture, restore", moves_on_the_gpu)
    report.run("attention in a transformers model", attention_in_a_transformers_model)
    report.run("attention", attention_on_the_gpu)
    report.run("segments: host time", lambda: host_time_of_segments(scratch))
    if arguments.tests:
        report.run("tests that need a GPU", gpu_tests)
        for tool in ("memcheck", "racecheck"):
            report.run(f"kernels: {tool}", lambda t=tool: sanitized(t))
    if arguments.large:
        measure_large(report, scratch)


def measure_large(report: Report, scratch: Path) -> None:
    """Measure a model with the shape of a 0.5B one."""
    model = scratch / "model"
    report.run("0.5B: random weights", lambda: str(write_random_model(model, QWEN2_0_5B).name))
    weights = (model / "model.safetensors").stat().st_size
    for attention in ("native", "plugin"):
        name, folder = f"0.5B {attention}", scratch / f"qwen2-0.5b-{attention}"
        report.run(f"{name}: build", lambda a=attention, f=folder: build(model, f, "float16", a, batch=8, length=1024))
        for batch in (1, 8):
            report.run(f"{name}: decode, batch {batch}", lambda b=batch, f=folder: decode_speed(f, b, 100, weights))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--tests", action="store_true", help="run the gpu-marked tests too")
    parser.add_argument("--large", action="store_true", help="measure the 0.5B-shaped model too")
    arguments = parser.parse_args()
    reason = find_gpu()
    if reason is not None:
        print(f"no GPU: {reason}", file=sys.stderr)
        return 2
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        measure(arguments, report, Path(scratch))
    write_result(arguments.out, {**describe_environment(gpu=True), "stages": report.stages})
    print(f"written: {arguments.out}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
