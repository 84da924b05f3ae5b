"""One thread at a time: a second one is refused before anything changes, and a session may pass from thread to thread between calls."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.helpers.sessions import by_prompt, continuation, make, observe
from trt_kvcache.errors import CapacityError, ThreadError

TEXT = (
    "this InferenceSession: expected calls from one thread at a time, but another thread is in a call. Nothing was changed. "
    "Use AsyncSession, or a session for each thread."
)


def in_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


@contextmanager
def held_in_a_step(session, call):
    """Another thread is in the enqueue of a call, for as long as the block lasts."""
    entered, leave = threading.Event(), threading.Event()
    enqueue = session.engine.enqueue

    def slow(stream):
        session.engine.enqueue = enqueue
        entered.set()
        assert leave.wait(60)
        enqueue(stream)

    session.engine.enqueue = slow
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        assert entered.wait(60)
        try:
            yield running
        finally:
            leave.set()


CALLS = {
    "prefill": lambda s, p: s.prefill([[1]]),
    "append": lambda s, p: s.append([[1]]),
    "decode": lambda s, p: s.decode([1]),
    "rewind": lambda s, p: s.rewind(0, 1),
    "generate": lambda s, p: s.generate([[1]]),
    "chat": lambda s, p: s.chat([{"role": "user", "content": ""}]),
    "submit": lambda s, p: s.submit([1]),
    "step": lambda s, p: s.step(),
    "save_snapshot": lambda s, p: s.save_snapshot(p / "x"),
    "load_snapshots": lambda s, p: s.load_snapshots(p / "x"),
    "resume": lambda s, p: s.resume(p / "x"),
    "close": lambda s, p: s.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_while_a_call_runs(name, tmp_path):
    session = make()
    session.prefill([[1, 2]])
    with held_in_a_step(session, lambda: session.append([[3, 4]])) as running:
        before = observe(session)
        with pytest.raises(ThreadError) as error:
            CALLS[name](session, tmp_path)
        assert (str(error.value), observe(session)) == (TEXT, before)
    running.result()
    assert session.tokens(0) == (1, 2, 3, 4)


def test_two_iterators_read_in_two_threads():
    session = make()
    first, second = session.generate([1, 2], max_new_tokens=4), session.generate([3], max_new_tokens=4)
    with held_in_a_step(session, lambda: next(first)) as running:
        for stream in (first, second):  # also the one that is being read
            with pytest.raises(ThreadError):
                next(stream)
            with pytest.raises(ThreadError):
                stream.close()
    assert [running.result().token, *(event.token for event in first)] == continuation([1, 2], 4)


def test_an_iterator_is_in_a_call_only_while_it_is_read():
    session = make()
    events = session.generate([1, 2], max_new_tokens=4)
    found = [next(events), in_thread(lambda: next(events)), next(events), in_thread(lambda: next(events))]
    assert [event.token for event in found] == continuation([1, 2], 4)
    assert by_prompt(in_thread(lambda: list(session.generate([3], max_new_tokens=2))))[0][0] == continuation([3], 2)


def test_a_call_that_fails_leaves_the_session_to_other_threads():
    session = make()
    session.prefill([[1, 2]])
    with pytest.raises(Exception, match="slot 7"):
        session.rewind(7, 0)
    in_thread(lambda: session.rewind(0, 1))
    assert session.tokens(0) == (1,)


def test_what_only_reads_is_not_refused():
    session = make()
    session.prefill([[1, 2]])
    with held_in_a_step(session, lambda: session.decode([3])):
        assert (session.tokens(0), session.statistics.decode_steps, session.max_sequence_length) == ((1, 2), 0, 16)


def test_many_threads_at_once_change_nothing_but_by_whole_calls():
    session = make(slots=1)
    session.prefill([[0]])
    wrong = []

    def use(token):
        for _ in range(200):
            try:
                session.append([[token]])
                session.rewind(0, 1)
            except (ThreadError, CapacityError):
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is
                wrong.append(error)

    threads = [threading.Thread(target=use, args=(token,)) for token in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert session.cache.host_kv_cache_lengths == (len(session.tokens(0)),)
