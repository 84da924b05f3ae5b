"""Sessions over the recording engine of ``fakes``, and what they should answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.fakes import cache_rows, kv_config, logits_after, recorded
from trt_kvcache import InferenceSession, KVLayout
from trt_kvcache.errors import KVCacheError

MAX_SEQUENCE_LENGTH = 16


def make(*, slots: int = 3, limit: int = MAX_SEQUENCE_LENGTH, combined: bool = False, **options: Any) -> InferenceSession:
    """Return a session over a recording engine and cache; ``options`` are those of the session."""
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    return InferenceSession(*recorded(kv_config(slots=slots, limit=limit, layout=layout), combined=combined), **options)


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def by_prompt(events: Iterable[Any]) -> list[tuple[list[int], str, str | None]]:
    """Return the tokens, the text and the reason to finish of each prompt."""
    result: dict[int, list[Any]] = {}
    for event in events:
        entry = result.setdefault(event.index, [[], "", None])
        assert entry[2] is None, "a token came after the last one"
        entry[0].append(event.token)
        entry[1] += event.text
        entry[2] = event.finish_reason
    return [tuple(result[index]) for index in sorted(result)]


def observe(session: InferenceSession) -> tuple[Any, ...]:
    """Return everything that a refused call must leave as it was."""
    slots = range(session.cache.active_batch_size)
    return (
        session.cache.host_kv_cache_lengths,
        session.cache.kv_cache_lengths.numpy().tolist(),
        [session.tokens(slot) for slot in slots],
        [session.pending_tokens(slot) for slot in slots],
        cache_rows(session.cache),
        session.statistics,
        len(session.engine.steps),
    )


def refuse(session: InferenceSession, kind: type[KVCacheError], call: Callable[[], object]) -> str:
    """Call what must fail; nothing is enqueued and nothing changes; return the text of the error."""
    before = observe(session)
    with pytest.raises(kind) as error:
        call()
    assert observe(session) == before
    return str(error.value)


def damage_logits(session: InferenceSession, slot: int) -> Callable[[], None]:
    """Make the engine answer NaN for a slot from now on; return what mends it."""
    run = session.engine._run

    def damaged() -> None:
        run()
        session.cache.memory.array(session.engine.steps[-1].bound["logits"])[slot] = np.nan

    session.engine._run = damaged
    return lambda: setattr(session.engine, "_run", run)
