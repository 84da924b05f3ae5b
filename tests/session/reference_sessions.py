"""Sessions of the reference engine over a small model, and what they should give."""

from __future__ import annotations

import pytest

from tests.helpers.assertions import assert_close

OPTIONS = {"engine": "reference", "max_sequence_length": 48, "max_prefill_length": 7, "dtype": "float32"}
UNSEEDED = {"temperature": 0.8, "ignore_eos": True}
SAMPLED = {**UNSEEDED, "seed": 11}
LONG = [*range(3, 15)]


def tokens(events, index=0):
    return [event.token for event in events if event.index == index]


def same(logits, expected):
    assert_close(logits, expected)


def fails(session, call):
    """Run a call whose step fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.engine, "enqueue", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call()
