"""The sides of ``end_to_end.py``: each runs a cell (a model, a batch, tokens past) and returns what it measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from end_to_end_models import RandomModel
from transformers import CompileConfig

from trt_kvcache import SamplingParams
from trt_kvcache.benchmarking import BenchmarkCase, CacheTraffic, MemoryLimit, Percentiles

SAMPLING = {"temperature": 0.8, "top_p": 0.9}
#: A text that no token has, so that it is looked for and never found.
STOP = "\x00 the end"

_ALONE_STEPS = 40

Result = dict[str, Any]


def ours(model: RandomModel, memory: Any, limit: MemoryLimit, batch: int, past: int, steps: int) -> Result:
    """``InferenceSession.generate`` whole on the torch engine: top-p sampling, text, a stop text."""
    width = min(past, max(64, 16384 // batch))
    with model.session(memory, slots=batch, length=past + steps + 1, width=width) as session:
        for seed in (3, 4):  # eager, and captured
            session.prefill(model.prompts(batch, past, seed=seed))
        params = SamplingParams(**SAMPLING, seed=1, stop=[STOP], ignore_eos=True, max_new_tokens=steps + 1)
        times = _token_times(session, model.prompts(batch, past, seed=1), params, batch)
        times = _token_times(session, model.prompts(batch, past, seed=2), params, batch)
        case = BenchmarkCase(prompt_tokens=past, generate_tokens=steps, batch_size=batch)
        limit_seconds = limit.generation_nbytes(case, CacheTraffic.of(session.cache.kv_config, model.config)) / limit.copy_bytes_per_second
        result = _summary(times, batch)
        alone = _engine_alone(session)
    step = (times[-1] - times[1]) / steps
    return {
        **result,
        "limit_ms": limit_seconds / steps * 1e3,
        "of_limit": limit_seconds / steps / step,
        "engine_alone_ms": alone * 1e3,
        "engine_of_limit": limit_seconds / steps / alone,
        "between_engine_us": (result["step_ms"]["median"] - alone * 1e3) * 1e3,
    }


def eager(model: RandomModel, batch: int, past: int, steps: int) -> Result:
    """``generate`` of transformers as it comes: a dynamic cache, nothing compiled."""
    return _transformers(model, batch, past, steps, disable_compile=True)


def compiled(model: RandomModel, batch: int, past: int, steps: int) -> Result:
    """``generate`` of transformers with a static cache and torch.compile, for exactly these shapes."""
    return _transformers(
        model, batch, past, steps, cache_implementation="static", compile_config=CompileConfig(dynamic=False, mode="reduce-overhead")
    )


def greedy_tokens(model: RandomModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the most likely tokens after a prompt, as transformers generates them."""
    tokens = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.peer.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count, disable_compile=True
        )
    return out[0, len(prompt) :].tolist()


def logits_and_error(model: RandomModel, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
    """Return the logits of transformers after some tokens, and how far they are at most from those of the same weights in more bits."""
    wider = {torch.bfloat16: torch.float32, torch.float32: torch.float64}[model.peer.dtype]
    given = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        logits, exact = (peer(given).logits[0, -1].double() for peer in (model.peer, copy.deepcopy(model.peer).to(wider)))
    return logits, float((logits - exact).abs().max())


class _Clock:
    """A streamer of transformers: notes when the tokens of each step are on the host, after their text was made."""

    def __init__(self, make_text: Callable[[list[int]], object]) -> None:
        self.times: list[float] = []
        self._make_text = make_text

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompts, and then the tokens of each step."""
        if not self.times:  # the prompts
            self.times.append(time.perf_counter())
            return
        self._make_text(tokens.tolist())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def _transformers(model: RandomModel, batch: int, past: int, steps: int, **options: Any) -> Result:
    """Run ``generate`` twice with sampling and text, then with neither."""

    def make_text(tokens: list[int]) -> None:
        for token in tokens:
            model.tokenizer.decode([token])

    def run(seed: int, text: Callable[[list[int]], object], **choice: Any) -> list[float]:
        prompts = torch.tensor(model.prompts(batch, past, seed=seed), device=model.device)
        clock = _Clock(text)
        with torch.inference_mode():
            torch.manual_seed(1)
            model.peer.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=steps + 1, streamer=clock, **choice, **options
            )
        return clock.times

    sampled = {"do_sample": True, "top_k": 0, **SAMPLING}
    started = time.perf_counter()
    run(1, make_text, **sampled)
    first = time.perf_counter() - started
    result = _summary(run(2, make_text, **sampled), batch)
    greedy = _summary(run(3, lambda tokens: None, do_sample=False), batch)
    return {**result, "greedy_step_ms": greedy["step_ms"], "first_run_s": first}


def _token_times(session: Any, prompts: list[list[int]], params: SamplingParams, batch: int) -> list[float]:
    """Return when a generation began, and when all slots had each token."""
    times = [time.perf_counter()]
    for token in session.generate(prompts, params):
        if token.index == batch - 1:
            times.append(time.perf_counter())
    return times


def _engine_alone(session: Any) -> float:
    """Return the seconds of a decode step of the engine, one behind the other: nothing between them but the launch.

    The last enqueue of the session was a decode step, so shapes and addresses are those of one. Lengths stay as they are.
    """
    memory, engine = session.cache.memory, session.engine
    stream = memory.create_stream()
    for _ in range(3):
        engine.enqueue(stream)
    memory.synchronize(stream)
    started = time.perf_counter()
    for _ in range(_ALONE_STEPS):
        engine.enqueue(stream)
    memory.synchronize(stream)
    return (time.perf_counter() - started) / _ALONE_STEPS


def _summary(times: Sequence[float], batch: int) -> Result:
    steps = [(after - before) * 1e3 for before, after in pairwise(times[1:])]
    return {
        "steps": len(steps),
        "first_token_ms": (times[1] - times[0]) * 1e3,
        "step_ms": vars(Percentiles.of(steps)),
        "tokens_per_second": batch * len(steps) / (times[-1] - times[1]),
    }
