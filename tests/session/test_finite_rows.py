"""After logits that are not finite, the next request of a slot gets what it gets in a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.paths import GOLDEN
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import EngineError

PROMPT, OTHER = [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11]
SIZES: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 32, "max_prefill_length": 8, "dtype": "float32"}
GREEDY = SamplingParams(max_new_tokens=4)


def opened(model: str, attention: str, **options: Any) -> InferenceSession:
    return InferenceSession.from_model(GOLDEN / model, engine="numpy", attention=attention, **SIZES, **options)


def overflow(session: InferenceSession) -> Callable[[], None]:
    """Have each step of the engine end in NaN: in the new rows, the states and the logits of all slots. Return what mends it."""
    engine, cache = session.engine, session.cache
    enqueue = engine.enqueue

    def damaged(stream: Any) -> None:
        lengths = cache.host_kv_cache_lengths
        enqueue(stream)
        tensors = [] if cache.kv_layers is None else cache.kv_layers.combined
        for slot, length in enumerate(lengths):
            for tensor in tensors:
                cache.memory.array(tensor)[slot, :, :, length : length + 3] = np.nan
        for view in [] if cache.states is None else [cache.get_next_recurrent_state(index) for index in recurrent(session)]:
            cache.memory.array(view)[: len(lengths)] = np.nan
        cache.memory.array(session._runner._buffers.device_views(1)[1])[...] = np.nan

    engine.enqueue = damaged  # type: ignore[method-assign]
    return lambda: setattr(engine, "enqueue", enqueue)


def recurrent(session: InferenceSession) -> list[int]:
    return [index for index, kind in enumerate(session.cache.layer_types) if kind.value == "mamba"]


def answer(session: InferenceSession, prompt: list[int]) -> list[int]:
    return [event.token for event in session.generate(prompt, GREEDY)]


@pytest.fixture(params=[("llama", "native"), ("llama", "mask"), ("llama", "plugin"), ("qwen3_5", "mask")], ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    model, attention = request.param
    return model, attention


@pytest.mark.parametrize("prompt_cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("prompt", [PROMPT, OTHER])
def test_the_next_request_of_a_slot_equals_one_in_a_fresh_slot(kind: tuple[str, str], prompt: list[int], prompt_cache_bytes: int) -> None:
    with opened(*kind) as fresh:
        expected = answer(fresh, prompt)
    with opened(*kind, prompt_cache_bytes=prompt_cache_bytes) as session:
        mend = overflow(session)
        with pytest.raises(EngineError, match="expected finite numbers"):
            answer(session, PROMPT)
        mend()
        assert session.cache.active_batch_size == 0
        assert answer(session, prompt) == expected


@pytest.mark.parametrize("on_device", [False, True])
def test_a_slot_that_overflows_later(kind: tuple[str, str], on_device: bool) -> None:
    with opened(*kind) as fresh:
        expected = answer(fresh, OTHER)
    with opened(*kind) as session:
        session._decode_steps.on_device = on_device
        events = session.generate(PROMPT, max_new_tokens=8)
        next(events)
        next(events)
        mend = overflow(session)
        with pytest.raises(EngineError, match="expected finite numbers"):
            list(events)
        mend()
        assert answer(session, OTHER) == expected


def test_queued_requests_run_again_in_clean_slots(kind: tuple[str, str]) -> None:
    with opened(*kind) as fresh:
        expected = answer(fresh, OTHER)
    with opened(*kind) as session:
        good, bad = session.submit(OTHER, GREEDY), session.submit(PROMPT, GREEDY)
        session.step()
        mend = overflow(session)
        with pytest.raises(EngineError, match="expected finite numbers"):
            session.step()
        mend()
        bad.cancel()
        while session.step():
            pass
        assert list(good.tokens) == expected


def test_scored_texts(kind: tuple[str, str]) -> None:
    with opened(*kind, max_logits_per_slot="all") as fresh:
        expected = fresh.score([OTHER])
    with opened(*kind, max_logits_per_slot="all") as session:
        mend = overflow(session)
        with pytest.raises(EngineError, match="expected finite numbers"):
            session.score([PROMPT])
        mend()
        assert session.score([OTHER]) == expected
