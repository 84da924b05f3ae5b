"""The sampling kernels on a GPU: are the tokens those of the host, and how fast are they. Part of ``sampling.py``; needs torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from sampling import CASES, VOCABULARIES, logits_of

from tests.kernels.sampling import CHOICES, KINDS, Row, make_logits, make_rows, make_tokens, random_edits
from trt_kvcache import CudaMemory, DeviceTensor, HostMemory
from trt_kvcache.kernels import SamplingWorkspace, choose_tokens

_ROTATED_NBYTES, _RUNS, _WARM_SECONDS = 256 << 20, 7, 0.1
BATCHES = (1, 8, 32)


def measure(quick: bool) -> dict[str, Any]:
    """Return what is measured; raises if a token differs from that of the host."""
    gpu = Gpu()
    checked = check(gpu, quick)
    print(json.dumps({"checked_rows": checked}), flush=True)
    bandwidth = copy_bandwidth()
    rows = []
    for vocab_size in VOCABULARIES[2:3] if quick else VOCABULARIES:
        for batch in BATCHES:
            row = gpu_row(gpu, vocab_size, batch, bandwidth)
            print(json.dumps(row), flush=True)
            rows.append(row)
    return {"checked_rows": checked, "copy_bandwidth": round(bandwidth / 1e9), "gpu_us": rows}


class Gpu:
    """Our memory and stream, and torch on that stream."""

    def __init__(self) -> None:
        self.memory = CudaMemory()
        self.stream = self.memory.create_stream()

    def seconds(self, calls: Sequence[Callable[[Any], object]]) -> float:
        """Return the seconds of one of the calls, in a graph of all of them."""
        calls[0](self.stream)
        builder = self.stream.create_graph_builder()
        builder.begin_building()
        for call in calls:
            call(builder)
        graph = builder.end_building().complete()
        return elapsed(lambda: graph.launch(self.stream), self.stream) / len(calls)


def elapsed(call: Callable[[], object], stream: Any = None) -> float:
    """Return the seconds of a call."""
    on = torch.cuda.current_stream() if stream is None else torch.cuda.ExternalStream(int(stream.handle))
    torch.cuda.synchronize()
    times, warm = [], time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < warm:
        call()
        torch.cuda.synchronize()
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(on)
        call()
        end.record(on)
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def copy_bandwidth() -> float:
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return 2 * source.numel() / elapsed(lambda: to.copy_(source))


# --- the same tokens as on the host ---


def check(gpu: Gpu, quick: bool) -> int:
    """Compare tokens, counters and results with those of the host; return how many rows."""
    host, checked = HostMemory(), 0
    host_stream = host.create_stream()
    for vocab_size in (1, 257, 32_000, 151_936) if quick else (1, 257, 5000, 32_000, 128_256, 151_936, 262_144):
        rng = np.random.default_rng(vocab_size)
        for kind in KINDS:
            for edits in (False, True):
                rows = [Row(seed=index, **one, **(random_edits(vocab_size, rng) if edits else {})) for index, one in enumerate(CHOICES)]
                logits = np.stack([make_logits(kind, vocab_size, rng) for _ in rows])
                (mine, tokens), (theirs, expected) = (
                    steps(memory, stream, rows, logits, 2) for memory, stream in ((gpu.memory, gpu.stream), (host, host_stream))
                )
                np.testing.assert_array_equal(tokens, expected, f"{vocab_size} {kind}")
                np.testing.assert_array_equal(mine, theirs, f"{vocab_size} {kind}")
                checked += len(rows) * 2
    return checked


def steps(memory: Any, stream: Any, rows: Sequence[Row], logits: Any, count: int) -> tuple[Any, Any]:
    made, tokens = make_rows(memory, list(rows), logits.shape[1], stream), make_tokens(memory, len(rows), stream)
    on_device = memory.to_device(logits, stream=stream)
    workspace = SamplingWorkspace(memory, rows=len(rows), vocab_size=logits.shape[1], stream=stream)
    chosen = []
    for _ in range(count):
        choose_tokens(on_device, made, tokens, workspace=workspace, stream=stream)
        chosen.append(tokens.numpy())
    return made.params.numpy(), np.stack(chosen)


# --- how fast ---


def gpu_row(gpu: Gpu, vocab_size: int, batch: int, bandwidth: float) -> dict[str, Any]:
    """Return microseconds of one call."""
    nbytes = batch * vocab_size * 4
    copies = max(2, min(512, _ROTATED_NBYTES // nbytes))
    row: dict[str, Any] = {"vocab": vocab_size, "batch": batch, "limit": round(nbytes / bandwidth * 1e6, 2)}
    for kind in ("peaked", "flat"):
        source = np.stack([logits_of(kind, vocab_size, seed) for seed in range(batch)])
        data = torch.from_numpy(source).cuda().repeat(copies, 1, 1)
        torch.cuda.synchronize()
        tensors = from_torch(gpu, data)
        workspace = SamplingWorkspace(gpu.memory, rows=batch, vocab_size=vocab_size, stream=gpu.stream)
        tokens = make_tokens(gpu.memory, batch, gpu.stream)
        of_kind: dict[str, Any] = {}
        for name, options in CASES.items():
            made = make_rows(gpu.memory, [row_of(options, seed) for seed in range(batch)], vocab_size, gpu.stream)
            calls = [
                lambda stream, logits=logits, made=made: choose_tokens(logits, made, tokens, workspace=workspace, stream=stream)  # noqa: B023
                for logits in tensors
            ]
            of_kind[name] = round(gpu.seconds(calls) * 1e6, 2)
        row[kind] = of_kind
        if kind == "peaked":
            row["peers"] = peers(data)
    return row


def from_torch(gpu: Gpu, data: Any) -> list[DeviceTensor]:
    """Return copies of logits ``[copies, B, vocab]`` in our memory, one tensor for each."""
    mine = DeviceTensor(gpu.memory.allocate(data.numel() * 4, stream=gpu.stream), shape=tuple(data.shape), dtype="float32")
    gpu.memory.synchronize(gpu.stream)
    torch.from_dlpack(mine).copy_(data)
    torch.cuda.synchronize()
    return [mine[index : index + 1].reshape(*data.shape[1:]) for index in range(len(data))]


def row_of(options: dict[str, Any], seed: int) -> Row:
    names = {"repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "frequency"}
    fields = {names.get(name, name): value for name, value in options.items()}
    used = tuple(range(1000)) if "repetition" in fields else ()
    return Row(**{"temperature": 0.0, **fields}, seed=seed, prompt=used, generated=used[:200])


def peers(data: Any) -> dict[str, Any]:
    """Return the microseconds of others, over the same logits: greedy and top-p of torch, top-p and both of FlashInfer."""
    calls: dict[str, Callable[[Any], object]] = {"torch_argmax": lambda logits: logits.argmax(-1), "torch_top_p": torch_top_p}
    if find_spec("flashinfer"):
        from flashinfer import sampling

        fixed = {"seed": 0, "offset": 0}  # or it asks torch's generator, which refuses in a capture
        calls["flashinfer_top_p"] = lambda logits: sampling.top_p_sampling_from_probs(torch.softmax(logits / 0.8, -1), 0.9, **fixed)
        calls["flashinfer_top_k_top_p"] = lambda logits: sampling.top_k_top_p_sampling_from_logits(logits / 0.8, 50, 0.9, **fixed)
    return {name: peer_us(call, data) for name, call in calls.items()}


def peer_us(call: Callable[[Any], object], data: Any) -> Any:
    """Return microseconds in a CUDA graph, or what went wrong."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            call(data[0])
        torch.cuda.synchronize()
        graph, count = torch.cuda.CUDAGraph(), min(len(data), 192)
        with torch.cuda.graph(graph):
            for index in range(count):
                call(data[index])
        return round(elapsed(graph.replay) / count * 1e6, 2)
    except Exception as error:  # noqa: BLE001  # of a library that is not ours
        return f"{type(error).__name__}: {error}"[:200]


def torch_top_p(logits: Any) -> Any:
    """Temperature and top-p as Hugging Face transformers does it, and one draw."""
    logits = logits / 0.8
    ordered, indices = torch.sort(logits, descending=False)
    removed = ordered.softmax(-1).cumsum(-1) <= 0.1
    removed[..., -1:] = False
    logits = logits.masked_fill(removed.scatter(1, indices, removed), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)
