"""Whole calls of a session with the PyTorch engine, by width and batch: prefill, append, verify + accept, decode, and a queue. Needs torch.

    python benchmarks/steps.py [-o FILE] [--models Qwen2-0.5B,Llama-3-8B] [--quick] [--device cpu] [--max-seconds 330]

Models of real shapes get random weights on the device. First, logits are compared: those of small models of the same families, in every
call and many widths, with those of the NumPy engine. Then each call is measured with 1024 tokens past. ``call_ms`` is the median of whole
calls from the third on, ``first_ms`` and ``second_ms`` are those that run a bucket eagerly and capture it, ``engine_ms`` is the time of the
same enqueue back to back, which on a GPU is the time of the GPU, and ``host_ms`` the difference. For prompts, ``exact_engine_ms`` is the
time of the GPU without padding. ``eager_us_per_layer`` is host time of an enqueue that is not captured. Exit code 1 if logits differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from environment import describe_environment, to_table, write_result
from random_model import LLAMA_3_8B, QWEN2_0_5B, QWEN3_4B
from torch_engine import random_loader

from trt_kvcache import CudaMemory, HostMemory, InferenceSession, KVCacheManager, SamplingParams
from trt_kvcache.doctor.random_model import write_random_model
from trt_kvcache.engine.decoder_cache import cache_config
from trt_kvcache.model import ModelConfig
from trt_kvcache.torch_engine import TorchEngine

HERE = Path(__file__).resolve().parent

MODELS = {"Qwen2-0.5B": QWEN2_0_5B, "Qwen3-4B": QWEN3_4B, "Llama-3-8B": LLAMA_3_8B}

#: At batch 1: time of the GPU for the step that verifies up to 8 tokens, and of a whole ``append`` of 16, over that of one token; of whole
#: prompts over that of the GPU for their exact width, apart from so many milliseconds; host time of a layer that is not captured.
LIMITS = {
    "verify_over_decode": {"Llama-3-8B": 1.15, "Qwen2-0.5B": 1.5},
    "append_16_over_decode": {"Llama-3-8B": 1.25, "Qwen2-0.5B": 1.8},
    "prefill_over_exact": 1.15,
    "prefill_ms_apart": 0.3,
    "eager_us_per_layer": 120.0,
}

PAST, SLOTS = 1024, 8
VERIFIED, APPENDED = (2, 3, 4, 5, 8, 17), (4, 16, 64, 256)
PROMPTS = (16, 64, 128, 200, 512, 600, 900, 1024)
BATCH_VERIFIED, BATCH_APPENDED, BATCH_PROMPTS = (2, 8), (16,), (128, 512)
RUNS, ALONE_STEPS, EAGER_WIDTHS = 10, 10, (16, 512)

#: Requests of the queue, tokens that each generates, and lengths of their prompts in turn.
REQUESTS, GENERATED, QUEUED_PROMPTS = 24, 48, (200, 90, 600, 33, 410, 150)
TINY_REQUESTS, TINY_GENERATED = 10, 4

#: Sizes of models whose logits are compared, and of those with which the script is tried.
SMALL = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    "num_key_value_heads": 2,
}
#: Relative to the largest logit, in bfloat16 and float32.
TOLERANCES = {"cuda": 0.08, "cpu": 1e-4}

Row = dict[str, Any]


def main() -> int:
    """Compare, measure, write the file after each model."""
    options = _options()
    content = {**describe_environment(gpu=options.device != "cpu"), "limits": LIMITS, "past": options.past, "models": {}}
    deadline = time.monotonic() + options.max_seconds
    with tempfile.TemporaryDirectory() as folder:
        content["compared"] = {name: compare(name, options.device, Path(folder)) for name in options.models}
    print(json.dumps({"compared": content["compared"]}), flush=True)
    for name in options.models:
        content["models"][name] = measure_model(name, options, deadline)
        write_result(options.out, content)
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    return int(not all(apart <= TOLERANCES[options.device] for apart in content["compared"].values()))


# --- logits ---


def compare(name: str, device: str, folder: Path) -> float:
    """Return how far logits of a small model are from those of the NumPy engine, relative to the largest one."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    write_random_model(folder / name, {**MODELS[name], **SMALL, "torch_dtype": dtype})
    sizes = {"max_batch_size": 3, "max_sequence_length": 256, "max_prefill_length": 128, "dtype": dtype}
    found = []
    for engine in ("torch", "reference"):
        with InferenceSession.from_model(folder / name, engine=engine, **sizes) as session:
            found.append(list(_logits_of_all_calls(session)))
    return max(float(np.nanmax(np.abs(one - other)) / np.nanmax(np.abs(other))) for one, other in zip(*found, strict=True))


def _logits_of_all_calls(session: InferenceSession) -> Any:
    """Yield logits of each call, three times, so that a graph is captured and replayed."""
    random = np.random.default_rng(1)

    def rows(*widths: int) -> list[list[int]]:
        return [random.integers(0, SMALL["vocab_size"], width).tolist() for width in widths]

    for _ in range(3):
        yield session.prefill(rows(37, 5, 110))
        yield session.decode([1, 2, 3])
        for widths in ((4, 1, 3), (8, 8, 8), (17, 2, 9)):
            logits = session.verify(rows(*widths))
            session.accept([1, 1, 0])
            yield logits
        yield session.append(rows(16, 3, 21))
        for length in (9, 100, 128):
            yield session.prefill(rows(length))


# --- times ---


def measure_model(name: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Return the rows of a model, the host time of its layers, and the memory of its graphs."""
    shape = {**MODELS[name], **SMALL, "torch_dtype": "float32"} if options.tiny else MODELS[name]
    config = ModelConfig.from_dict(shape)
    memory = HostMemory() if options.device == "cpu" else CudaMemory()
    kv = cache_config(config, max_batch_size=SLOTS, max_sequence_length=2 * options.past + 64, dtype=config.dtype)
    load = random_loader(config, config.dtype, torch.device("cpu" if options.device == "cpu" else "cuda:0"))
    started = time.monotonic()
    engine = TorchEngine(config, load, kv=kv, max_prefill_length=options.past, max_logits_per_slot=min(64, options.past), memory=memory)
    rows: list[Row] = []
    skipped = []
    with InferenceSession(engine, KVCacheManager(kv, memory=memory)) as session:
        calls = Calls(session, options)
        for what, batch, widths in options.cells:
            for width in widths:
                if time.monotonic() > deadline:
                    skipped.append(f"{what} b{batch} w{width}")
                    continue
                rows.append({"call": what, "batch": batch, "width": width, **calls.measure(what, batch, width)})
                print(name, json.dumps(rows[-1]), flush=True)
        queue = [calls.queue(options.requests, options.generated) for _ in range(2)]
        print(name, json.dumps({"queue": queue}), flush=True)
        eager = None if options.device == "cpu" else {str(width): calls.eager_us_per_layer(width) for width in options.eager_widths}
        graphs = engine._device.graphs
        used = None if graphs is None else {"graphs": len(graphs), "mib": graphs.nbytes / 2**20, "budget_mib": graphs.max_nbytes / 2**20}
        refusals = list(engine.graph_refusals)
    result = {"layers": config.num_layers, "eager_us_per_layer": eager, "graphs": used, "graph_refusals": refusals, "queue": queue}
    print(name, json.dumps(result), flush=True)
    return {**result, "skipped": skipped, "seconds": time.monotonic() - started, "rows": to_table(rows)}


class Calls:
    """Calls of a session in slots that hold the same tokens each time."""

    def __init__(self, session: InferenceSession, options: argparse.Namespace) -> None:
        self._session, self._engine, self._runner = session, session.engine, session._runner
        self._past, self._runs = options.past, options.runs
        self._vocab = session.engine.tensors["logits"].shape[-1]
        self._random = np.random.default_rng(0)
        self._prompts = self._rows(SLOTS, self._past)

    def _rows(self, batch: int, width: int) -> list[list[int]]:
        rows: list[list[int]] = self._random.integers(0, self._vocab, (batch, width)).tolist()
        return rows

    def measure(self, what: str, batch: int, width: int) -> Row:
        """Return the times of one call, with the tokens before it back in their slots each time."""
        session, rows = self._session, self._rows(batch, width)
        if what == "prefill":
            row = self._timed(lambda: session.prefill(rows), lambda: None)
            return {**row, **self._exact(rows)}
        session.prefill(self._prompts[:batch])

        def back() -> None:
            for slot in range(batch):
                session.rewind(slot, self._past)

        def verify() -> None:
            session.verify(rows)
            session.accept([1] * batch)

        tokens = [row[0] for row in rows]
        return self._timed({"decode": lambda: session.decode(tokens), "append": lambda: session.append(rows), "verify": verify}[what], back)

    def _timed(self, call: Callable[[], Any], back: Callable[[], None]) -> Row:
        times = []
        for _ in range(2 + self._runs):
            back()
            self._runner.synchronize()
            started = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - started))
        engine = self._engine_ms()
        back()
        middle = median(times[2:])
        return {
            "call_ms": middle,
            "best_ms": min(times[2:]),
            "first_ms": times[0],
            "second_ms": times[1],
            "engine_ms": engine,
            "host_ms": middle - engine,
        }

    def _engine_ms(self) -> float:
        """Return the milliseconds of the last enqueue, one after the other. Lengths stay as they are; rows past S are dropped."""
        for _ in range(3):  # eager, captured, replayed, if nothing before was
            self._engine.enqueue(self._runner.stream)
        self._runner.synchronize()
        started = time.perf_counter()
        for _ in range(ALONE_STEPS):
            self._engine.enqueue(self._runner.stream)
        self._runner.synchronize()
        return 1e3 * (time.perf_counter() - started) / ALONE_STEPS

    def _exact(self, rows: Sequence[Sequence[int]]) -> Row:
        """Return the milliseconds of the engine for prompts without padding."""
        buckets, self._engine.width_buckets = self._engine.width_buckets, ()
        try:
            self._session.prefill(rows)
            return {"exact_engine_ms": self._engine_ms()}
        finally:
            self._engine.width_buckets = buckets

    def eager_us_per_layer(self, width: int) -> float:
        """Return the host time of an enqueue that is not captured, for each layer. Nothing is waited for."""
        is_captured = self._engine._is_captured
        self._engine._is_captured = lambda step: False
        try:
            times = []
            rows = self._rows(1, width)
            for _ in range(self._runs):
                self._session.prefill(rows)
                started = time.perf_counter()
                self._engine.enqueue(self._runner.stream)
                times.append(time.perf_counter() - started)
                self._runner.synchronize()
        finally:
            self._engine._is_captured = is_captured
        return 1e6 * median(times) / self._engine._config.num_layers

    def queue(self, requests: int, generated: int) -> dict[str, float]:
        """Return milliseconds of steps that only decode and of steps that run prompts too, and tokens a second."""
        session, params = self._session, SamplingParams(temperature=0.0, max_new_tokens=generated, ignore_eos=True)
        session.prefill([[1]])  # the slots are free then
        for index in range(requests):
            length = min(QUEUED_PROMPTS[index % len(QUEUED_PROMPTS)], self._past)
            session.submit(self._rows(1, length)[0], params)
        steps: dict[bool, list[float]] = {True: [], False: []}
        began = time.perf_counter()
        while True:
            before, started = session.statistics.prefill_tokens, time.perf_counter()
            if not session.step():
                break
            steps[session.statistics.prefill_tokens > before].append(1e3 * (time.perf_counter() - started))
        seconds = time.perf_counter() - began
        return {
            "decode_step_ms": median(steps[False]),
            "admitting_step_ms": median(steps[True]),
            "longest_step_ms": max(map(max, steps.values())),
            "tokens_per_second": requests * generated / seconds,
        }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer calls; on a CPU tiny models, which tries the script")
    parser.add_argument("--max-seconds", type=float, default=330.0, help="begin no cell after so long")
    parser.add_argument("-o", "--out", type=Path, default=HERE / "results" / "steps.json")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"--models: expected names of {', '.join(MODELS)}, got {', '.join(unknown)}.")
    if (options.quick or options.device == "cpu") and options.out == parser.get_default("out"):
        parser.error("expected --out with --quick and --device cpu, which measure nothing that belongs into the results.")
    options.tiny = options.quick and options.device == "cpu"
    if options.tiny:
        torch.set_num_threads(1)
    options.past, options.runs = (64, 3) if options.tiny else (PAST, RUNS // 2 if options.quick else RUNS)
    options.requests, options.generated = (TINY_REQUESTS, TINY_GENERATED) if options.tiny else (REQUESTS, GENERATED)
    options.eager_widths = (16,) if options.quick else EAGER_WIDTHS
    if options.quick:
        options.cells = [("decode", 1, (1,)), ("verify", 1, (4,)), ("append", 3, (16,)), ("prefill", 1, (16, 60)), ("prefill", 3, (20,))]
    else:
        alone = [("decode", (1,)), ("verify", VERIFIED), ("append", APPENDED), ("prefill", PROMPTS)]
        together = [("decode", (1,)), ("verify", BATCH_VERIFIED), ("append", BATCH_APPENDED), ("prefill", BATCH_PROMPTS)]
        options.cells = [(what, 1, widths) for what, widths in alone] + [(what, SLOTS, widths) for what, widths in together]
    return options


if __name__ == "__main__":
    sys.exit(main())
