"""Random calls on a session beside lists of tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.recording import (
    VOCAB,
    logits_after,
    poison,
)
from tests.helpers.sessions import MAX_SEQUENCE_LENGTH, by_prompt, continuation
from tests.session.every_logit import with_every_logit
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import (
    CapacityError,
    LayoutError,
    ShapeError,
)

S = MAX_SEQUENCE_LENGTH


class Oracle:
    """What the slots should hold."""

    def __init__(self) -> None:
        self.cached: list[list[int]] = []
        self.pending: list[list[int]] = []

    def check(self, session: InferenceSession) -> None:
        assert session.cache.active_batch_size == len(self.cached)
        assert [list(session.tokens(slot)) for slot in range(len(self.cached))] == self.cached
        assert [list(session.pending_tokens(slot)) for slot in range(len(self.cached))] == self.pending
        assert session.cache.host_kv_cache_lengths == tuple(map(len, self.cached))
        assert session.cache.kv_cache_lengths.numpy().tolist() == list(map(len, self.cached))


TOKENS = st.integers(0, 30)


@given(data=st.data())
@pytest.mark.parametrize("combined", [False, True], ids=["separate", "combined"])
@pytest.mark.parametrize(("slots", "limit"), [(3, 16), (4, 7), (9, 7)], ids=["aligned", "not aligned", "every eighth"])
def test_random_programs(slots, limit, combined, data):
    session, oracle = with_every_logit(slots=slots, limit=limit, width=4, logits=3, combined=combined), Oracle()
    rows = st.lists(st.lists(TOKENS, min_size=1, max_size=limit), min_size=1, max_size=slots)
    for _ in range(data.draw(st.integers(1, 8))):
        poison(session.cache)
        _OPERATIONS[data.draw(st.sampled_from(sorted(_OPERATIONS)))](session, oracle, data, rows, limit)
        oracle.check(session)
    session.close()
    assert session.cache.memory.live_nbytes == 0


def _prefill(session, oracle, data, rows, limit):
    prompts = data.draw(rows)
    reuse = len(prompts) == len(oracle.cached) and data.draw(st.booleans())
    if reuse:  # begin some as the slots do
        prompts = [(held + row)[:limit] if data.draw(st.booleans()) else row for held, row in zip(oracle.cached, prompts, strict=True)]
    np.testing.assert_array_equal(session.prefill(prompts, reuse=reuse), [logits_after(row) for row in prompts])
    oracle.cached, oracle.pending = [list(row) for row in prompts], [[] for _ in prompts]


def _append(session, oracle, data, rows, limit):
    turns = [data.draw(st.lists(TOKENS, max_size=4)) for _ in oracle.cached]
    wanted = [pending + turn if turn else [] for pending, turn in zip(oracle.pending, turns, strict=True)]
    try:
        logits = session.append(turns)
    except CapacityError:
        assert any(len(held) + len(row) > limit for held, row in zip(oracle.cached, wanted, strict=True))
        return
    except LayoutError:
        assert limit == 7
        assert any(len(held) == limit for held in oracle.cached)
        return
    for slot, row in enumerate(wanted):
        oracle.cached[slot] += row
        oracle.pending[slot] = [] if row else oracle.pending[slot]
        expected = logits_after(oracle.cached[slot]) if row else np.full(VOCAB, np.nan, np.float32)
        np.testing.assert_array_equal(logits[slot], expected)


def _decode(session, oracle, data, rows, limit):
    tokens = [data.draw(TOKENS) for _ in oracle.cached]
    try:
        logits = session.decode(tokens)
    except CapacityError:
        assert any(len(held) == limit for held in oracle.cached)
        return
    except ShapeError:
        assert not tokens
        return
    for held, token in zip(oracle.cached, tokens, strict=True):
        held.append(token)
    oracle.pending = [[] for _ in tokens]
    np.testing.assert_array_equal(logits, [logits_after(held) for held in oracle.cached])


def _verify(session, oracle, data, rows, limit):
    tokens = [data.draw(st.lists(TOKENS, max_size=3)) for _ in oracle.cached]
    try:
        logits = session.verify(tokens)
    except ShapeError:
        assert not any(tokens)
        return
    except CapacityError:
        assert any(len(held) + len(row) > limit for held, row in zip(oracle.cached, tokens, strict=True))
        return
    except LayoutError:
        assert limit == 7
        assert any(len(held) == limit for held in oracle.cached)
        return
    oracle.check(session)
    for held, row, of_slot in zip(oracle.cached, tokens, logits, strict=True):
        expected = [logits_after([*held, *row[: place + 1]]) for place in range(len(row))]
        np.testing.assert_array_equal(of_slot, [*expected, *np.full((len(of_slot) - len(row), VOCAB), np.nan, np.float32)])
    if data.draw(st.booleans()):
        return  # what was run is not kept
    counts = [data.draw(st.integers(0, len(row))) for row in tokens]
    session.accept(counts)
    for slot, (row, count) in enumerate(zip(tokens, counts, strict=True)):
        oracle.cached[slot] += row[:count]
        oracle.pending[slot] = [] if count else oracle.pending[slot]


def _rewind(session, oracle, data, rows, limit):
    if oracle.cached:
        slot = data.draw(st.integers(0, len(oracle.cached) - 1))
        length = data.draw(st.integers(0, len(oracle.cached[slot])))
        session.rewind(slot, length)
        del oracle.cached[slot][length:]
        oracle.pending[slot] = []


def _generate(session, oracle, data, rows, limit):
    append = bool(oracle.cached) and data.draw(st.booleans())
    prompts = [data.draw(st.lists(TOKENS, min_size=1, max_size=3)) for _ in oracle.cached] if append else data.draw(rows)
    params = [SamplingParams(max_new_tokens=data.draw(st.integers(1, 5))) for _ in prompts]
    before = [c + p for c, p in zip(oracle.cached, oracle.pending, strict=True)] if append else [[] for _ in prompts]
    try:
        events = session.generate(prompts, params, append=append)
        seen = [next(events)]
    except CapacityError:
        assert any(len(held) + len(row) > limit for held, row in zip(before, prompts, strict=True))
        return
    except LayoutError:
        assert limit == 7
        assert append
        return
    seen += itertools.islice(events, data.draw(st.integers(0, 12)))
    events.close()
    found = by_prompt(seen)
    for slot, (held, prompt) in enumerate(zip(before, prompts, strict=True)):
        whole = [*held, *prompt]
        tokens, _, reason = found[slot] if slot < len(found) else ([], "", None)
        assert tokens == continuation(whole, len(tokens))
        room = limit - len(whole) + 1
        assert reason == ("length" if tokens and len(tokens) == min(room, params[slot].max_new_tokens) else None)
        assert [*session.tokens(slot), *session.pending_tokens(slot)] == [*whole, *tokens]
        assert len(session.pending_tokens(slot)) <= 2
    slots = range(len(prompts))
    oracle.cached = [list(session.tokens(slot)) for slot in slots]
    oracle.pending = [list(session.pending_tokens(slot)) for slot in slots]


_OPERATIONS = {"prefill": _prefill, "append": _append, "decode": _decode, "verify": _verify, "rewind": _rewind, "generate": _generate}
