"""``AsyncSession``: tasks share the batches of one session, each request gets what it gets alone, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from tests.helpers.assertions import raises
from tests.helpers.sessions import Pace, alone, continuation, damage_logits, make, sampled
from tests.paths import ROOT
from trt_kvcache import AsyncSession, SamplingParams
from trt_kvcache.errors import CapacityError, ClosedError, EngineError, ProcessorError, RangeError
from trt_kvcache.session import session_thread
from trt_kvcache.session.session_source import SessionSource
from trt_kvcache.session.session_thread import SessionThread

PROMPTS = [[index % 7, *range(index % 5)] for index in range(24)]


@pytest.fixture(autouse=True, params=["host", "device"])
def place(request, monkeypatch):
    """Tokens are delivered after their step, or while the host waits for the next one."""
    monkeypatch.setattr(session_thread, "_waits_for_a_device", lambda session: request.param == "device")
    return request.param


def run(main):
    """Run a coroutine function; whoever waits for ever fails the test."""
    return asyncio.run(asyncio.wait_for(main(), 60))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "trt_kvcache session"]


def outcome(request):
    return request.tokens, request.text, request.finish_reason


@pytest.mark.parametrize("slots", [1, 8])
def test_each_request_gets_what_it_gets_alone(slots):
    params = [sampled(2 + index % 6, seed=index) for index in range(len(PROMPTS))]

    async def main():
        async with AsyncSession(make(slots=slots)) as served:
            requests = [await served.submit(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
            return [outcome(await request.wait()) for request in requests]

    assert run(main) == [alone(make(slots=1), prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert threads() == []


@pytest.mark.parametrize("slots", [1, 8])
def test_cancelled_tasks_do_not_change_what_the_others_get(slots):
    params = [sampled(9, seed=index) for index in range(len(PROMPTS))]

    async def read(served, index, stop):
        """Read some tokens; then the task is cancelled at its next wait."""
        found = []
        async with aclosing(served.generate(PROMPTS[index], params[index])) as stream:
            async for event in stream:
                found.append(event.token)
                if len(found) == stop:
                    asyncio.current_task().cancel()
        return found

    async def main():
        session = make(slots=slots)
        async with AsyncSession(session) as served:
            tasks = [asyncio.create_task(read(served, index, index % 9 + 1 if index % 3 else None)) for index in range(len(PROMPTS))]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            assert await served.run(lambda session: session.step()) == []
            assert session.cache.active_batch_size == 0
            return results

    for index, result in enumerate(run(main)):
        if index % 3:
            assert isinstance(result, asyncio.CancelledError) or len(result) == 9
        else:
            assert tuple(result) == alone(make(slots=1), PROMPTS[index], params[index])[0]


def test_a_task_that_is_cancelled_while_it_waits_cancels_its_request():
    release = threading.Event()

    async def main():
        session = make(slots=1)
        enqueue = session.engine.enqueue

        def slow(stream):
            assert release.wait(60)
            enqueue(stream)

        session.engine.enqueue = slow
        async with AsyncSession(session) as served:
            request = await served.submit([1], max_new_tokens=15)
            waiting = asyncio.create_task(request.wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            release.set()
            await request.wait()
            assert (request.finish_reason, len(request.tokens) < 15) == ("cancelled", True)

    run(main)


def test_requests_share_batches():
    session, pace = make(slots=8), Pace().hold()

    async def main():
        async with AsyncSession(pace.attach(session)) as served:
            requests = await asyncio.gather(*[served.submit([index], max_new_tokens=8) for index in range(8)])
            pace.go()
            await asyncio.gather(*[request.wait() for request in requests])

    run(main)
    assert session.statistics.decode_steps == 7


def test_tokens_come_as_they_are_made():
    async def main():
        async with AsyncSession(make(slots=1)) as served:
            request = await served.submit([1, 2], max_new_tokens=6)
            found = [event.token async for event in request]
            again = [event.token async for event in request]
            assert found == again == continuation([1, 2], 6)
            assert [event.index for event in request.events] == [request.handle.index] * 6

    run(main)


def test_tokens_of_a_device_are_delivered_when_the_next_step_is_enqueued(place, monkeypatch):
    session, happened = make(slots=1), []
    enqueue, call_in_loop = session.engine.enqueue, SessionThread._call_in_loop

    def noted(self, function, *arguments):
        if function is session_thread._call_all:
            happened.append("deliver")
        call_in_loop(self, function, *arguments)

    monkeypatch.setattr(session.engine, "enqueue", lambda stream: happened.append("enqueue") or enqueue(stream))
    monkeypatch.setattr(SessionThread, "_call_in_loop", noted)

    async def main():
        async with AsyncSession(session) as served:
            await (await served.submit([1, 2], max_new_tokens=4)).wait()

    run(main)
    if place == "host":
        assert happened == ["enqueue", "deliver"] * 4
    else:
        assert happened == ["enqueue", *["enqueue", "deliver"] * 3, "deliver"]


def test_a_thread_that_dies_delivers_the_last_tokens_of_requests_that_have_ended(monkeypatch):
    class Death(BaseException):
        pass

    session, go, running = make(slots=2), threading.Event(), []
    enqueue = session.engine.enqueue

    def dies(stream):
        go.wait(20)
        running.append(len(session.running_requests))
        if running[-1] == 1 and 2 in running:  # the short request has left its slot
            raise Death
        enqueue(stream)

    monkeypatch.setattr(session.engine, "enqueue", dies)

    async def main():
        served = AsyncSession(session)
        await served.start()
        long = await served.submit([3], max_new_tokens=9)
        submitted = asyncio.create_task(served.submit([1, 2], max_new_tokens=3))
        await asyncio.sleep(0)  # the command is in the queue
        go.set()
        short = await submitted
        assert (await asyncio.wait_for(short.wait(), 20)).tokens == tuple(continuation([1, 2], 3))
        with pytest.raises(Death):
            await asyncio.wait_for(long.wait(), 20)
        with pytest.raises(Death):
            await served.close()

    run(main)


def test_other_tasks_run_meanwhile():
    release = threading.Event()

    async def main():
        session = make()
        enqueue = session.engine.enqueue

        def slow(stream):
            assert release.wait(60)
            enqueue(stream)

        session.engine.enqueue = slow
        async with AsyncSession(session) as served:
            request = await served.submit([1], max_new_tokens=1)
            release.set()  # only a loop that is not blocked gets here
            await request.wait()

    run(main)


def test_submit_waits_while_there_are_too_many():
    async def main():
        pace = Pace().hold()
        async with AsyncSession(pace.attach(make(slots=1)), max_requests=2) as served:
            first = await served.submit([1], max_new_tokens=12)
            second = await served.submit([2], max_new_tokens=12)
            third = asyncio.create_task(served.submit([3], max_new_tokens=2))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not third.done()
            first.cancel()
            request = await third
            pace.go()
            assert (await request.wait()).tokens == tuple(continuation([3], 2))
            await second.wait()

    run(main)


@pytest.mark.parametrize("failing", ["refused", "cancelled", "abandoned"])
def test_a_request_that_never_began_makes_room_again(failing):
    async def main():
        async with AsyncSession(make(slots=1), max_requests=1) as served:
            for _ in range(3):
                if failing == "refused":
                    with pytest.raises(CapacityError):
                        await served.submit([1] * 99)
                elif failing == "cancelled":
                    task = asyncio.create_task(served.submit([1]))
                    await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                else:
                    async for _ in served.generate([1], max_new_tokens=9):
                        break
            assert len((await (await served.submit([1], max_new_tokens=2)).wait()).tokens) == 2

    run(main)


def test_a_processor_that_fails_ends_its_own_request():
    async def main():
        async with AsyncSession(make(slots=3)) as served:
            good = await served.submit([1, 2], max_new_tokens=6)
            bad = await served.submit([3], max_new_tokens=6, logits_processors=[lambda seen, logits: None])
            with pytest.raises(ProcessorError, match=r"^request 1: logits_processors\[0\]"):
                await bad.wait()
            assert bad.finish_reason is None
            assert (await good.wait()).tokens == tuple(continuation([1, 2], 6))

    run(main)


def test_a_step_that_fails_reaches_everyone_who_waits_and_the_session_goes_on():
    async def main():
        session = make(slots=2)
        mend = damage_logits(session, 0)
        async with AsyncSession(session) as served:
            requests = [await served.submit([index], max_new_tokens=3) for index in range(3)]
            for result in await asyncio.gather(*[request.wait() for request in requests], return_exceptions=True):
                assert isinstance(result, EngineError)
            mend()
            assert (await (await served.submit([1], max_new_tokens=3)).wait()).tokens == tuple(continuation([1], 3))

    run(main)


def test_closing_ends_what_runs_and_what_waits():
    release = threading.Event()

    async def main():
        session = make(slots=1)
        enqueue = session.engine.enqueue

        def slow(stream):
            assert release.wait(60)
            enqueue(stream)

        session.engine.enqueue = slow
        served = AsyncSession(session, max_requests=1)
        await served.start()
        request = await served.submit([1], max_new_tokens=14)
        tasks = [asyncio.create_task(call) for call in (request.wait(), served.submit([5]), served.close())]
        await asyncio.sleep(0)
        release.set()
        waited, submitted, closed = await asyncio.gather(*tasks, return_exceptions=True)
        assert (type(waited), type(submitted), closed) == (ClosedError, ClosedError, None)
        assert len(request.tokens) < 14
        await served.close()
        with pytest.raises(ClosedError, match=r"^this AsyncSession is closed\.$"):
            await served.submit([1])
        assert session.engine.closed == 1

    run(main)
    assert threads() == []


def test_a_start_that_fails_leaves_nobody_waiting_behind_a_task_that_was_cancelled():
    release = threading.Event()

    def source():
        assert release.wait(60)
        raise RangeError("no model")

    async def main():
        served = AsyncSession(source, max_requests=1)
        starting = asyncio.create_task(served.start())
        await asyncio.sleep(0)
        first, second = (asyncio.create_task(served.submit([token])) for token in (1, 2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        release.set()
        started, waited = await asyncio.gather(starting, second, return_exceptions=True)
        assert (type(started), type(waited)) == (RangeError, ClosedError)

    run(main)
    assert threads() == []


def test_a_request_can_be_cancelled_when_all_has_ended():
    async def main():
        async with AsyncSession(make()) as served:
            request = await served.submit([1], max_new_tokens=2)
            await request.wait()
        request.cancel()
        assert (request.finish_reason, served._thread._commands.empty()) == ("length", True)

    run(main)


def test_it_must_be_started_once():
    async def main():
        served = AsyncSession(make())
        with raises(ClosedError, "this AsyncSession", expected="start() first, or async with"):
            await served.submit([1])
        async with served:
            with pytest.raises(ClosedError, match="second time"):
                await served.start()

    run(main)


def test_a_session_is_opened_in_the_thread():
    names = []

    def source():
        names.append(threading.current_thread().name)
        return SessionSource(ROOT / "examples" / "tiny-llama", engine="reference")()

    async def main():
        async with AsyncSession(source) as served:
            return "".join([event.text async for event in served.generate("Alice was", max_new_tokens=4)])

    assert run(main) == " beginn"
    assert names == ["trt_kvcache session"]


def test_a_session_that_cannot_be_opened():
    async def main():
        with pytest.raises(RangeError, match="no model"):
            async with AsyncSession(lambda: (_ for _ in ()).throw(RangeError("no model"))):
                pass

    run(main)
    assert threads() == []


def test_a_function_is_called_between_two_steps():
    async def main():
        async with AsyncSession(make()) as served:
            assert await served.run(lambda session: session.vocab_size) > 0
            with pytest.raises(ZeroDivisionError):
                await served.run(lambda session: 1 // 0)

    run(main)


def test_an_event_loop_that_ends_without_close_takes_the_thread_along():
    async def main():
        served = AsyncSession(make(slots=1))
        await served.start()
        await served.submit([1], SamplingParams(max_new_tokens=15))
        return served

    served = run(main)
    for thread in threads():
        thread.join(60)
    assert threads() == []
    assert served._thread._source.engine.closed == 1


def test_in_words():
    async def main():
        async with AsyncSession(make()) as served:
            request = await (await served.submit([1], max_new_tokens=2)).wait()
            assert repr(request) == "AsyncRequest(state='ended', tokens=2, finish_reason='length')"

    run(main)


def test_the_number_of_requests_is_checked():
    with raises(RangeError, "max_requests", expected="at least 1", got=0):
        AsyncSession(make(), max_requests=0)


def test_slots_are_free_when_all_requests_have_ended():
    async def main():
        session = make(slots=4)
        async with AsyncSession(session) as served:
            requests = [await served.submit([index], max_new_tokens=3) for index in range(3)]
            requests[1].cancel()
            for request in requests:
                await request.wait()
            while await served.run(lambda session: session.cache.active_batch_size):
                pass

    run(main)


def test_a_step_that_fails_is_not_tried_again_before_the_next_request(monkeypatch):
    tried = []

    async def main():
        session = make(slots=2)
        step = session.step

        def fail_with_held_slots():
            if not session.running_requests:
                return step()
            tried.append(len(tried))
            raise EngineError("planted")

        monkeypatch.setattr(session, "step", fail_with_held_slots)
        async with AsyncSession(session) as served:
            request = await served.submit([1], max_new_tokens=30)
            with pytest.raises(EngineError, match="planted"):
                await request.wait()
            await asyncio.sleep(0.1)
            assert len(tried) == 1
            monkeypatch.undo()
            assert (await (await served.submit([1], max_new_tokens=3)).wait()).tokens == tuple(continuation([1], 3))

    run(main)


def test_answers_to_one_prompt_are_submitted_together():
    params = [sampled(3, seed=index) for index in range(3)]

    async def main():
        async with AsyncSession(make(slots=3), max_requests=3) as served:
            first, second = await asyncio.gather(*[submit_and_wait(served, [4, 5, 6], params) for _ in range(2)])
            with raises(CapacityError, "params", expected="at most max_requests=3 answers", got=4):
                await served.submit_answers([4], [*params, params[0]])
            with pytest.raises(CapacityError, match="prompt 0 has 17 tokens"):
                await served.submit_answers([1] * 17, params)
            return first, second, await submit_and_wait(served, [4, 5, 6], params)  # the refused ones take no room

    async def submit_and_wait(served, prompt, params):
        return [outcome(await request.wait()) for request in await served.submit_answers(prompt, params)]

    expected = [alone(make(), [4, 5, 6], one) for one in params]
    assert run(main) == (expected, expected, expected)
