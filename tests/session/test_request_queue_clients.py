"""Clients of the queue take turns, and what is cancelled leaves it at once."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from tests.helpers.assertions import raises
from tests.helpers.sessions import alone, drain, make, outcome, sampled
from trt_kvcache import SamplingParams
from trt_kvcache.errors import ConfigError


def submit(session, client, count=1, tokens=3):
    return [session.submit([1, 2], max_new_tokens=tokens, client=client) for _ in range(count)]


def ends(session, *groups):
    """Step to the end; return the names of the groups in the order in which their requests ended."""
    names = {handle.index: name for name, handles in zip("abcdefgh", groups, strict=False) for handle in handles}
    found = ""
    while moved := session.step():
        found += "".join(names[handle.index] for handle in moved if handle.finished)
    return found


def test_a_client_with_many_long_requests_delays_another_by_those_that_run():
    session = make(slots=2)
    many = submit(session, "a", 100, tokens=9)
    session.step()
    [short] = submit(session, "b", tokens=1)
    while not short.finished:
        session.step()
    assert sum(handle.state != "queued" for handle in many) == 2 + 1  # the second slot became free in the same step


def test_one_slot_goes_from_client_to_client():
    session = make(slots=1)
    first = submit(session, "a", 4)
    session.step()
    assert ends(session, first, submit(session, "b", 2), submit(session, "c", 1)) == "abcabaa"


def test_slots_are_shared_evenly():
    session = make(slots=4, limit=60)
    submit(session, "a", 40, tokens=5)
    submit(session, "b", 40, tokens=50)
    for _ in range(40):
        session.step()
        if len(session.running_requests) == 4 and session.statistics.decode_steps > 10:
            clients = [queued.client for queued in session._queue.scheduler.running if not queued.finished]
            assert clients.count("b") == 2


def test_without_names_the_first_is_first():
    session = make(slots=1)
    assert ends(session, submit(session, "", 2), submit(session, "", 1), submit(session, "", 1)) == "aabc"


def test_a_client_of_many_names_does_not_keep_another_out():
    session = make(slots=2)
    crowd = [submit(session, f"name {number}")[0] for number in range(50)]
    [late] = submit(session, "b")
    later = [submit(session, f"later {number}")[0] for number in range(50)]
    while not late.finished:
        session.step()
    assert all(handle.finished for handle in crowd[:48])
    assert all(handle.state == "queued" for handle in later[2:])


def test_requests_whose_slots_were_taken_are_first_again():
    session = make(slots=2)
    running = submit(session, "a", 2)
    session.step()
    waiting = submit(session, "b", 2)
    session.prefill([[1]])
    session.step()
    assert [handle.state for handle in (*running, *waiting)] == ["decoding"] * 2 + ["queued"] * 2


def test_a_request_that_returns_can_be_cancelled():
    session = make(slots=2)
    running = submit(session, "a", 2)
    session.step()
    session.prefill([[1]])
    before = running[0].tokens
    running[0].cancel()
    [other] = submit(session, "b")
    session.step()
    assert (running[0].tokens, session.num_waiting_requests, other.state) == (before, 0, "decoding")


def test_a_cancelled_request_leaves_the_queue_at_once():
    session = make(slots=1)
    submit(session, "a")
    session.step()
    first, second, third = submit(session, "b", 3)
    second.cancel()
    assert session.num_waiting_requests == 2
    first.cancel()
    third.cancel()
    assert (session.num_waiting_requests, session.num_waiting_clients, session._queue.scheduler.waiting._lines) == (0, 0, {})


@pytest.mark.parametrize("count", [1000, pytest.param(60_000, marks=pytest.mark.long)])
def test_cancelled_requests_behind_one_that_waits_leave_nothing(count):
    session = make(slots=1, limit=600)
    submit(session, "", 2, tokens=500)
    session.step()
    prompt = [0] * 500
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(count):
        session.submit(prompt, max_new_tokens=5).cancel()
    assert session.num_waiting_requests == 1
    gc.collect()
    assert len(gc.get_objects()) < before + 500


def test_another_thread_may_cancel_while_steps_run():
    session = make(slots=2)
    handles = [submit(session, "ab"[number % 2], tokens=2)[0] for number in range(400)]
    cancelling = threading.Thread(target=lambda: [handle.cancel() for handle in handles[1::2]])
    cancelling.start()
    drain(session)
    cancelling.join()
    drain(session)
    assert all(handle.finish_reason == "length" for handle in handles[::2])
    assert session.num_waiting_requests == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_of_many_clients_give_each_request_what_it_gets_alone(seed):
    chance, session, lonely = random.Random(seed), make(slots=1 + seed % 4, reuse=(seed % 2) << 14), make()
    asked = []
    for _ in range(150):
        what = chance.random()
        if what < 0.4:
            prompt, params = (
                [chance.randrange(3) for _ in range(chance.randrange(1, 12))],
                sampled(chance.randrange(1, 5), chance.randrange(9)),
            )
            asked.append((session.submit(prompt, params, client=chance.choice("abcdef")), prompt, params))
        elif what < 0.5 and asked:
            chance.choice(asked)[0].cancel()
        elif what < 0.53:
            session.prefill([[1, 2]])
        else:
            session.step()
    drain(session)
    assert (session.num_waiting_requests, session._queue.scheduler.waiting._lines) == (0, {})
    for handle, prompt, params in asked:
        expected = alone(lonely, prompt, params)
        if handle.finish_reason == "cancelled":
            assert handle.tokens == expected[0][: len(handle.tokens)]
        else:
            assert outcome(handle) == expected


def test_a_name_that_is_no_text_is_refused():
    session = make()
    with raises(ConfigError, "client", "text", "int"):
        session.submit([1], SamplingParams(), client=3)
    assert session.num_waiting_requests == 0
