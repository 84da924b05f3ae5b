"""Everything that only a GPU can show, in one command: what it accepts, whether it computes right, how fast it is.

    python benchmarks/gpu.py [--out benchmarks/results/gpu.json] [--tests] [--large]

Each stage prints one line and never stops the later ones. Exit code 1 if one failed, 2 without a GPU. ``--dry-run`` runs the
same stages with the NumPy reference engine in the place of TensorRT: it checks this script, on any machine, and measures
nothing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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

from trt_kvcache import InferenceSession, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout, Lengths, build_engine
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.errors import CaptureError, KVCacheError
from trt_kvcache.memory.cuda_memory import CudaMemory, find_gpu

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny-llama"

#: Largest |difference| of logits from the reference engine, over the largest |logit|. The reference accumulates in float32; an
#: engine rounds every activation to its dtype.
TOLERANCES = {"float32": 5e-3, "float16": 2e-2, "bfloat16": 1e-1}

#: A model whose head dim, 64, the plugin's kernels serve.
WIDE = {**QWEN2_0_5B, "vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}

RAGGED_PROMPTS = [[0, 9, 17, 5, 33, 21, 8], [0, 41, 7], [0, 12, 99, 45, 3]]
PROMPT = "The rabbit-hole went straight"


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


def installed_versions() -> dict[str, str]:
    """Return the versions of what takes part."""
    versions = {}
    for name in ("tensorrt", "tensorrt_rtx", "cuda.core", "cuda.bindings", "torch", "numpy"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except (ImportError, AttributeError) as error:
            versions[name] = f"not there ({error})"
    return versions


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


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest expected magnitude; NaN counts as infinite."""
    difference = np.abs(got - expected).max()
    return float("inf") if np.isnan(difference) else float(difference / np.abs(expected).max())


def logits_agree(folder: Path, engine: str, dtype: str) -> dict[str, Any]:
    """Compare ragged prefill, decode and a second turn with the reference engine.

    The prompts differ in length, so a mask that ``key_value_lengths`` does not shift per slot would show here.
    """
    errors = {}
    with InferenceSession.open(folder, engine=engine) as session, InferenceSession.open(folder, engine="reference") as reference:
        for name, step in (
            ("ragged prefill", lambda s: s.prefill(RAGGED_PROMPTS)),
            ("decode", lambda s: s.decode([11, 23, 4])),
            ("decode again", lambda s: s.decode([6, 30, 14])),
            ("second turn", lambda s: s.append([[8, 15], [77, 2, 19, 5], [50]])),
        ):
            errors[name] = relative_error(step(session), step(reference))
    worst = max(errors.values())
    assert worst <= TOLERANCES[dtype], f"relative error {worst:.3g} over {TOLERANCES[dtype]}: {errors}"
    return errors


def fill_dead_rows(session: InferenceSession, value: float) -> None:
    """Overwrite every row of K and V beyond the live ones."""
    cache, stream = session.cache, session.cache.memory.create_stream()
    for layer in range(cache.num_layers):
        combined = cache.kv_config.layout is KVLayout.COMBINED
        for view in (cache.get_combined_kv_cache(layer),) if combined else cache.get_separate_kv_cache(layer):
            rows = view.numpy()
            for slot in range(view.shape[0]):
                live = cache.host_kv_cache_lengths[slot] if slot < cache.active_batch_size else 0
                rows[slot, ..., live:, :] = value
            cache.memory.upload(view, rows, stream=stream)
            cache.memory.synchronize(stream)


def dead_rows_do_not_matter(folder: Path, engine: str, poison: float) -> dict[str, Any]:
    """Decode with clean and with poisoned dead rows; the logits must be the same."""
    results = []
    for value in (0.0, poison):
        with InferenceSession.open(folder, engine=engine) as session:
            session.prefill(RAGGED_PROMPTS)
            fill_dead_rows(session, value)
            results.append([session.decode([11, 23, 4]), session.append([[8, 15], [77], [50, 3, 9]])])
    errors = [relative_error(poisoned, clean) for clean, poisoned in zip(*results, strict=True)]
    assert max(errors) == 0, f"dead rows are read: relative errors {errors}"
    return {"poison": str(poison), "relative_errors": errors}


def generate(folder: Path, engine: str) -> dict[str, Any]:
    """Generate with the shipped model; the text must be the reference engine's."""
    texts, rates = [], []
    for name in (engine, "reference"):
        with InferenceSession.open(folder, engine=name) as session:
            texts.append("".join(event.text for event in session.generate(PROMPT, temperature=0.0, max_new_tokens=100)))
            rates.append(session.statistics.decode_tokens_per_second)
    return {"text": texts[0], "same_as_reference": texts[0] == texts[1], "tokens_per_second": round(rates[0], 1)}


def decode_speed(folder: Path, engine: str, batch: int, steps: int, weights_nbytes: int) -> dict[str, Any]:
    """Measure decode steps of a random prompt; beside it, the time that reading the weights once takes at copy speed."""
    rng = np.random.default_rng(0)
    with InferenceSession.open(folder, engine=engine) as session:
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


def open_twice(folder: Path, engine: str) -> dict[str, Any]:
    """Open an engine twice: the second time, what TensorRT for RTX compiled comes from the user's cache folder."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        with InferenceSession.open(folder, engine=engine) as session:
            session.prefill([[0, 1, 2]])
            session.decode([3])
        seconds.append(round(time.perf_counter() - started, 3))
    return {"first_seconds": seconds[0], "second_seconds": seconds[1]}


def views_in_torch() -> dict[str, Any]:
    """Read and write cache views through DLPack in torch, where it is there: no copy, every dtype, strided views too."""
    import torch

    shown = {}
    for dtype in ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8"):
        memory = CudaMemory()
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16)]
        config = KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=5, dtype=dtype, layout=KVLayout.COMBINED)
        with KVCacheManager(config, memory=memory) as cache:
            _, v = cache.get_separate_kv_cache(0)
            tensor = torch.from_dlpack(v)
            assert tensor.data_ptr() == v.ptr
            assert tuple(tensor.shape) == v.shape
            assert tensor.stride() == v.strides
            tensor[1] = 2
            torch.cuda.synchronize()
            values = v.numpy().astype(np.float32)
            assert (values[1] == 2).all()
            assert not values[[0, 2]].any()
            shown[dtype] = str(tensor.dtype)
    return shown


def commit_in_a_graph(replays: int = 5) -> dict[str, Any]:
    """Capture a commit in a CUDA graph and replay it; host values are refused while capturing."""
    memory = CudaMemory()
    stream = memory.create_stream()
    lengths = Lengths(3, 100, memory=memory)
    lengths.reset([1, 2, 3], stream=stream)
    lengths.commit(1, stream=stream)
    builder = stream.create_graph_builder()
    builder.begin_building()
    lengths.commit(2, stream=builder)
    try:
        lengths.reset([0], stream=builder)
        raise AssertionError("reset was captured")
    except CaptureError as error:
        refusal = str(error)
    graph = builder.end_building().complete()
    for _ in range(replays):
        lengths.replayed(2)
        graph.launch(stream)
    memory.synchronize(stream)
    assert tuple(lengths.tensor.numpy()) == lengths.host == tuple(length + 1 + 2 * replays for length in (1, 2, 3))
    return {"lengths": lengths.host, "refusal": refusal}


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
    """Generate on our cache and attention in a torch model, and compare with its own SDPA: see ``tests/helpers/hf_cache.py``."""
    sys.path.append(str(ROOT))
    from tests.helpers import hf_cache

    return hf_cache.hf_adapter()


def host_time_of_segments(scratch: Path) -> dict[str, Any]:
    """Measure segments that do nothing, in a process of its own: see ``segments.py``."""
    out = scratch / "segments.json"
    subprocess.run([sys.executable, ROOT / "benchmarks" / "segments.py", "--out", out], check=True, capture_output=True, timeout=300)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return {name: result[name] for name in ("launches", "eager_us", "eager_us_per_layer", "graph_us")}


def measure(arguments: argparse.Namespace, report: Report, scratch: Path) -> None:
    """Run all stages, correctness first."""
    report.run("versions", installed_versions)
    if not arguments.dry_run:
        report.run("cache: views in torch", views_in_torch)
        report.run("cache: commit in a CUDA graph", commit_in_a_graph)
        report.run("cache: compaction, capture, restore", moves_on_the_gpu)
        report.run("attention in a transformers model", attention_in_a_transformers_model)
        report.run("attention", attention_on_the_gpu)
        report.run("segments: host time", lambda: host_time_of_segments(scratch))
    if arguments.tests:
        report.run("tests that need a GPU", gpu_tests)
        for tool in ("memcheck", "racecheck"):
            report.run(f"kernels: {tool}", lambda t=tool: sanitized(t))
    engine = "reference" if arguments.dry_run else "tensorrt"
    report.run("engines: built", lambda: build(TINY, scratch / "first", "float16", "native", batch=4))
    report.run("engines: accepted", lambda: open_twice(scratch / "first", engine))
    if report.stages["engines: accepted"]["ok"]:
        measure_engines(engine, arguments.large, report, scratch)


def measure_engines(engine: str, large: bool, report: Report, scratch: Path) -> None:
    """Run the stages that need an engine that runs."""
    models = {"native": TINY, "mask": TINY, "plugin": scratch / "wide"}
    report.run("plugin: random weights", lambda: write_random_model(models["plugin"], WIDE))
    for dtype, attention in itertools.product(TOLERANCES, models):
        if (dtype, attention) == ("float32", "plugin"):
            continue  # its kernels have 16 bit
        name, folder, model = f"{dtype} {attention}", scratch / f"{dtype}-{attention}", models[attention]
        report.run(f"{name}: build", lambda d=dtype, a=attention, f=folder, m=model: build(m, f, d, a, batch=4))
        report.run(f"{name}: logits agree with the reference", lambda d=dtype, f=folder: logits_agree(f, engine, d))
        poison = 1e4 if attention == "mask" else float("nan")
        report.run(f"{name}: dead rows do not matter", lambda f=folder, p=poison: dead_rows_do_not_matter(f, engine, p))
    report.run("generate with the shipped model", lambda: generate(scratch / "float16-native", engine))
    if large:
        model = scratch / "model"
        report.run("0.5B: random weights", lambda: write_random_model(model, QWEN2_0_5B))
        weights = (model / "model.safetensors").stat().st_size
        for attention in ("native", "plugin"):
            name, folder = f"0.5B {attention}", scratch / f"qwen2-0.5b-{attention}"
            report.run(f"{name}: build", lambda a=attention, f=folder: build(model, f, "float16", a, batch=8, length=1024))
            for batch in (1, 8):
                report.run(f"{name}: decode, batch {batch}", lambda b=batch, f=folder: decode_speed(f, engine, b, 100, weights))
            report.run(f"{name}: logits agree with the reference", lambda f=folder: logits_agree(f, engine, "float16"))


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--tests", action="store_true", help="run the gpu-marked tests too")
    parser.add_argument("--large", action="store_true", help="measure the 0.5B-shaped model too")
    parser.add_argument("--dry-run", action="store_true", help="check this script with the reference engine, without a GPU")
    arguments = parser.parse_args()
    reason = None if arguments.dry_run else find_gpu()
    if reason is not None:
        print(f"no GPU: {reason}", file=sys.stderr)
        return 2
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        measure(arguments, report, Path(scratch))
    result = {**describe_environment(gpu=not arguments.dry_run), "dry_run": arguments.dry_run, "stages": report.stages}
    write_result(arguments.out, result)
    print(f"written: {arguments.out}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
