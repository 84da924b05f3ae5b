"""Many requests that share few slots, a tenth of them cancelled: each gets what it gets alone, and memory stays flat."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.sessions import every_model
from tests.faults.watch import begin_peak, peak_growth
from trt_kvcache import InferenceSession

OPTIONS: dict[str, Any] = {"engine": "reference", "max_batch_size": 8, "max_sequence_length": 64, "max_prefill_length": 8}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 6, "ignore_eos": True}

_END_OF_TOKENS = 79  # that every model has


def drawn_tokens(chance: random.Random, longest: int) -> list[int]:
    return [chance.randrange(3, _END_OF_TOKENS) for _ in range(chance.randrange(1, longest))]


def drawn_requests(chance: random.Random, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, some of which begin alike, and how each goes on."""
    beginnings = [drawn_tokens(chance, 20) for _ in range(10)]
    return [
        (
            chance.choice(beginnings) + drawn_tokens(chance, 12),
            {**(SAMPLED | {"seed": number} if number % 3 == 0 else GREEDY), "max_new_tokens": chance.randrange(1, 12)},
        )
        for number in range(count)
    ]


def alone(session: InferenceSession, prompt: list[int], options: dict[str, Any]) -> tuple[int, ...]:
    return tuple(event.token for event in session.generate([prompt], **options))


@every_model
@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_each_gets_what_it_gets_alone(model: Path, count: int) -> None:
    chance = random.Random(3)
    wanted = drawn_requests(chance, count)
    with InferenceSession.from_model(model, dtype="float32", prompt_cache_bytes=1 << 18, **OPTIONS) as session:
        handles: list[Any] = []
        cancelled = 0
        while len(handles) < count or not all(handle.finished for handle in handles[-50:]):
            for prompt, options in wanted[len(handles) : len(handles) + chance.randrange(0, 6)]:
                handles.append(session.submit(prompt, **options))
            if handles and chance.random() < 0.3:
                cancelled += chance.choice(handles[-20:]).cancel()
            session.step()
        while session.step():
            pass
        assert all(handle.finished for handle in handles)
        assert count * 0.05 < cancelled < count * 0.4
    with InferenceSession.from_model(model, dtype="float32", **{**OPTIONS, "max_batch_size": 1}) as session:
        for (prompt, options), handle in zip(wanted, handles, strict=True):
            expected = alone(session, prompt, options)
            assert handle.tokens == expected[: len(handle.tokens)]
            assert len(handle.tokens) == len(expected) or handle.finish_reason == "cancelled"


@every_model
@pytest.mark.parametrize("count", [60, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(model: Path, count: int) -> None:
    chance = random.Random(4)
    with InferenceSession.from_model(model, prompt_cache_bytes=1 << 16, **OPTIONS) as session:
        run_steps(session, chance, max(60, count // 4))  # by then most shapes of a step have occurred, whose tensors are kept
        gc.collect()
        before, live, objects = begin_peak(), session.cache.memory.live_nbytes, len(gc.get_objects())
        run_steps(session, chance, count)
        gc.collect()
        assert peak_growth(before) < 16 << 20
        assert session.cache.memory.live_nbytes <= live + (1 << 16)
        assert len(gc.get_objects()) < objects + 5000


def run_steps(session: InferenceSession, chance: random.Random, count: int) -> None:
    """Keep the slots full for so many steps; then let all requests end."""
    running: list[Any] = []
    for _ in range(count):
        running = [handle for handle in running if not handle.finished]
        while len(running) < 10:
            ((prompt, options),) = drawn_requests(chance, 1)
            running.append(session.submit(prompt, **options))
        if chance.random() < 0.05:
            chance.choice(running).cancel()
        session.step()
    while session.step():
        pass
