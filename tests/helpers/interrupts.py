"""Interrupt a session at any call, or at any line of the package, and look at what is left."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

import trt_kvcache
from tests.helpers.recording import VOCAB, cache_rows
from trt_kvcache.errors import EngineError

PACKAGE = str(Path(trt_kvcache.__file__).parent)


class LineTracer:
    """Counts the visits of every line of the package in a call, or raises KeyboardInterrupt at one of them."""

    def __init__(self, call, at=None):
        self.visits = {}
        self._at = at
        before = sys.gettrace()
        files = PACKAGE if at is None else at[0][0]  # to look at every line of the package takes long
        sys.settrace(lambda frame, event, arg: self._line if frame.f_code.co_filename.startswith(files) else None)
        try:
            call()
        finally:
            sys.settrace(before)

    def _line(self, frame, event, arg):
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            visit = self.visits.get(line, 0)
            self.visits[line] = visit + 1
            if self._at == (line, visit):
                self._at = None  # one interrupt; the clean-up after it is left alone
                raise KeyboardInterrupt
        return self._line


def first_or_last(visits):
    """Return each line with one of its visits, in turns: the first, and the last of the next line."""
    return [(line, range(count)[-(number % 2)]) for number, (line, count) in enumerate(visits.items())]


ERRORS = {"exception": EngineError("the engine said no"), "interrupt": KeyboardInterrupt(), "exit": GeneratorExit()}


before_or_after = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def journal(session):
    return session.engine.memory.journal


def names(calls):
    return [call[0] for call in calls]


def calls_of(session, call):
    journal(session).take()
    call()
    return journal(session).take()


def decode_calls(stream):
    """All that a decode step of two slots calls."""
    enqueue = [("upload", (2, 1), stream), ("use_profile", 1), ("enqueue", stream), ("commit", 1, stream)]
    return [*enqueue, ("download", (2, VOCAB), stream), ("synchronize", stream)]


def lengths(session):
    """The lengths by tokens, which those of host and device must agree with."""
    held = [len(session.tokens(slot)) for slot in range(session.cache.active_batch_size)]
    assert held == list(session.cache.host_kv_cache_lengths) == session.cache.kv_cache_lengths.numpy().tolist()
    return held


def sequences(session):
    """What a step that failed must leave: lengths on host and device, tokens, rows, which memory is held."""
    slots = range(len(lengths(session)))
    tokens = [(session.tokens(slot), session.pending_tokens(slot)) for slot in slots]
    return tokens, cache_rows(session.cache), session.cache.memory.live_nbytes


def state(session):
    """The sequences, and the statistics, which may have counted a step that was interrupted between two lines."""
    return sequences(session), session.statistics.decode_steps, session.statistics.decode_tokens


def count_calls(call):
    """Return how many functions, of Python and of C, a call enters. Garbage of other tests is not collected meanwhile: that counts too."""
    events = []
    gc.collect()
    gc.disable()
    sys.setprofile(lambda frame, event, arg: events.append(event) if event in ("call", "c_call") else None)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(events)
