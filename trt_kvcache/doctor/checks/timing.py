"""Check I: time of decode steps, on the host and on the GPU, and the speed of a copy. It measures, and sets no limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trt_kvcache.benchmarking.copy_speed import copy_bytes_per_second
from trt_kvcache.benchmarking.memory_use import free_and_total
from trt_kvcache.doctor.cases import CaseLog, NotHere
from trt_kvcache.doctor.models import CheckedModel, own_model, wide_model
from trt_kvcache.doctor.settings import Settings
from trt_kvcache.doctor.subjects import SUBJECTS, Subject, case_name
from trt_kvcache.kernels import AttentionWorkspace, attend
from trt_kvcache.memory.base import Memory
from trt_kvcache.memory.tensor import DeviceTensor
from trt_kvcache.session.session import InferenceSession

_WARM_UP, _STEPS, _DRY_STEPS = 5, 50, 2
_SHORT = 16

#: K and V of the attention kernel alone: more than any cache of a GPU, and at most this share of the free memory.
_KV_NBYTES, _FREE_SHARE = 512 << 20, 4


def check(settings: Settings, log: CaseLog) -> None:
    """Measure copies, the attention kernel, and every engine."""
    memory = settings.memory()
    log.run("copy", lambda: {"gb_per_second": round(copy_bytes_per_second(memory) / 1e9, 1)})
    log.run("attention kernel", lambda: _attention_kernel(memory))
    for model in filter(None, (wide_model(settings), own_model(settings))):
        dtype = model.dtypes[0]
        for subject in SUBJECTS:
            name = case_name(subject.variant, model, dtype)
            log.run(name, lambda s=subject, m=model, d=dtype: decode_times(settings, s, m, d), variant=subject.variant)  # type: ignore[misc]


def _attention_kernel(memory: Memory) -> dict[str, Any]:
    """Measure one decode launch over full slots, and over slots with a few tokens."""
    if memory.is_host:
        raise NotHere("dry run: no kernel runs")
    heads, head_dim, slots = 8, 128, 8
    free, _ = free_and_total(memory)
    row = slots * 2 * heads * head_dim * 2
    tokens = min(_KV_NBYTES, free // _FREE_SHARE) // row
    stream = memory.create_stream()

    def tensor(*shape: int) -> DeviceTensor:
        nbytes = int(np.prod(shape)) * 2
        return DeviceTensor(memory.allocate(nbytes, zeroed=True, stream=stream), shape=shape, dtype="float16")

    q, k, v = tensor(slots, 1, 4 * heads, head_dim), tensor(slots, 1, heads, head_dim), tensor(slots, 1, heads, head_dim)
    out, cache = tensor(slots, 1, 4 * heads, head_dim), tensor(slots, 2, heads, tokens, head_dim)
    workspace = AttentionWorkspace(memory, num_heads=4 * heads, num_kv_heads=heads, head_dim=head_dim, stream=stream)
    seconds = {}
    for past in (_SHORT, tokens - 1):
        lengths = memory.to_device(np.full(slots, past, np.int32), stream=stream)
        launch = partial(attend, q, k, v, cache, lengths, out=out, workspace=workspace, stream=stream)
        seconds[past] = _seconds_each(launch, lambda: memory.synchronize(stream), _STEPS)
    full = seconds[tokens - 1]
    return {
        "tokens": tokens,
        "us": round(full * 1e6, 1),
        f"us_at_{_SHORT}": round(seconds[_SHORT] * 1e6, 1),
        "gb_per_second": round(row * tokens / full / 1e9, 1),
    }


def decode_times(settings: Settings, subject: Subject, model: CheckedModel, dtype: str) -> dict[str, Any]:
    """Measure decode steps of all slots at two lengths, eager and by a CUDA graph. Figures of a dry run say nothing."""
    long = 48 if settings.dry_run else model.length - _WARM_UP - _STEPS - 8
    steps = _DRY_STEPS if settings.dry_run else _STEPS
    figures: dict[str, Any] = {"slots": model.slots}
    modes = (False, True) if subject.engine == "tensorrt" else (True,)  # PyTorch always captures
    for cuda_graphs in modes:
        mode = "graph" if cuda_graphs else "eager"
        with subject.open(settings, model, dtype, cuda_graphs=cuda_graphs) as session:
            for length in (_SHORT, long):
                figures |= {f"{mode}_{name}_at_{length}": value for name, value in _enqueue_times(session, model, length, steps).items()}
    last = "graph" if modes[-1] else "eager"
    figures["long_over_short"] = round(figures[f"{last}_step_us_at_{long}"] / figures[f"{last}_step_us_at_{_SHORT}"], 2)
    return figures


def _enqueue_times(session: InferenceSession, model: CheckedModel, length: int, steps: int) -> dict[str, float]:
    """Return the microseconds of a step, and those that the host spends in its enqueue."""
    random = np.random.default_rng(5)
    prompts = random.integers(3, session.vocab_size, (model.slots, length)).tolist()
    tokens = session.prefill(prompts).argmax(axis=1).tolist()
    for _ in range(_WARM_UP):
        tokens = session.decode(tokens).argmax(axis=1).tolist()
    memory, engine = session.cache.memory, session.engine
    stream = memory.create_stream()
    host = []
    for _ in range(steps):  # the same step again and again: its lengths are not committed
        started = time.perf_counter()
        engine.enqueue(stream)
        host.append(time.perf_counter() - started)
        memory.synchronize(stream)
    step = _seconds_each(lambda: engine.enqueue(stream), lambda: memory.synchronize(stream), steps)
    return {"host_us": round(float(np.median(host)) * 1e6, 1), "step_us": round(step * 1e6, 1)}


def _seconds_each(work: Callable[[], object], wait: Callable[[], object], steps: int) -> float:
    """Return the seconds of one call in the fastest of a few rows of calls with one wait."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(steps):
            work()
        wait()
        times.append((time.perf_counter() - started) / steps)
    return min(times[1:])
