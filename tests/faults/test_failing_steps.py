"""Decode steps that fail after the engine has run: the rows of K and V that a session says it holds are those of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.faults.sessions import MODEL
from tests.helpers.sessions import ahead
from trt_kvcache import InferenceSession
from trt_kvcache.errors import EngineError

S = 16


def rows(session: InferenceSession, slot: int) -> list[np.ndarray[Any, Any]]:
    """K and V of the tokens that a slot holds."""
    saved = session.cache.capture_kv_cache(slot, len(session.tokens(slot)), stream=session.cache.memory.create_stream())
    return [layer.numpy() for layer in saved]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_over_a_slot_that_is_full_and_idle(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """A row for it is computed with the others, in the place of its last token."""
    with InferenceSession.from_model(MODEL, engine="reference", max_batch_size=2, max_sequence_length=S) as session:
        events = (ahead(session) if on_device else session).generate([[*range(5, 5 + S - 2)], [7, 8]], max_new_tokens=9, ignore_eos=True)
        while next(events).finish_reason is None:
            pass
        next(events)  # of the other request, in the same step
        before, tokens = rows(session, 0), session.tokens(0) + session.pending_tokens(0)
        assert len(session.tokens(0)) == S
        enqueue = session.engine.enqueue

        def fail_behind(stream: Any) -> None:
            enqueue(stream)
            raise EngineError("too late")

        monkeypatch.setattr(session.engine, "enqueue", fail_behind)
        with pytest.raises(EngineError, match="too late"):
            next(events)
        assert session.tokens(0) + session.pending_tokens(0) == tokens
        for now, then in zip(rows(session, 0), before, strict=True):
            np.testing.assert_array_equal(now, then[:, :, : len(session.tokens(0))])
