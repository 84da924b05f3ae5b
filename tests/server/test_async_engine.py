"""``AsyncEngine``: answers as alone, slots that become free, a bounded queue, an orderly end."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import aclosing

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.sessions import Pace
from tests.server.engines import MODEL, alone, answers, held_slots, request, run, running, source
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, QueueFullError, RangeError, ShapeError
from trt_kvcache.server.async_engine import AsyncEngine, RequestContext
from trt_kvcache.session.session_source import SessionSource

pytest.importorskip("tokenizers")

PROMPTS = [[index + 3, *range(5, 5 + index % 7)] for index in range(24)]


@pytest.mark.parametrize("slots", [1, 8])
def test_each_answer_is_what_the_session_gives_alone(slots):
    wanted = [request(prompt, 3 + index % 9, temperature=1.3, seed=index) for index, prompt in enumerate(PROMPTS)]

    async def main():
        async with running(slots) as engine:
            return await asyncio.gather(*[answers(engine, one) for one in wanted])

    for one, [answer] in zip(wanted, run(main), strict=True):
        assert (answer["token_ids"], answer["text"]) == alone(one)
        assert answer["finish_reason"] == "length"
        count = len(one["token_ids"])
        generated = one["stop_conditions"]["max_tokens"]
        assert answer["completion_usage"] == {
            "prompt_tokens": count,
            "completion_tokens": generated,
            "total_tokens": count + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def test_what_it_says_of_itself():
    async def main():
        async with running(3, max_queue=5) as engine:
            return engine.config, (await engine.stats()), engine.num_live

    config, stats, live = run(main)
    assert (config.model, config.max_num_seqs, config.max_queue, config.context_length, config.vocab_size) == ("tiny", 3, 5, 128, 320)
    assert (config.eos_token_ids, config.has_chat_template, config.scores_prompts) == ((1,), False, True)
    assert (stats.slots, stats.waiting, stats.session.decode_tokens, live) == ((), 0, 0, 0)


def test_prompts_with_rows_and_their_ids():
    rows = np.random.default_rng(0).normal(size=(2, 32))

    async def main():
        async with running(2, max_embeddings=2) as engine:
            other = asyncio.create_task(answers(engine, request([5, 6, 7], 40)))
            await asyncio.sleep(0)
            first, second = await engine.add_embeddings(rows)
            found = await answers(engine, request([5, first, second, 6], 6, temperature=0.0))
            await other
            with raises(CapacityError, "embeddings", expected="at most 2"):
                await engine.add_embeddings(rows + 1)
            with raises(RangeError, "prompts[0][0]", expected=f"from 0 to {second}", got=str(second + 1)):
                await answers(engine, request([second + 1], 6))
        with pytest.raises(ClosedError):
            await engine.add_embeddings(rows)
        return found

    [answer] = run(main)
    with source(1, max_embeddings=2)() as session:
        first, second = session.add_embeddings(rows)
        events = session.generate([[5, first, second, 6]], max_new_tokens=6, ignore_eos=True, temperature=0.0)
        assert answer["token_ids"] == [event.token for event in events]


def test_several_answers_to_one_prompt_are_those_of_following_seeds():
    async def main():
        async with running(2) as engine:
            return await answers(engine, request([5, 6, 7], 6, temperature=1.5, seed=11, n=4))

    found = run(main)
    assert [answer["token_ids"] for answer in found] == [alone(request([5, 6, 7], 6, temperature=1.5, seed=11 + i))[0] for i in range(4)]
    assert len({tuple(answer["token_ids"]) for answer in found}) == 4


def test_several_answers_to_one_prompt_run_it_once():
    prompt = [5 + index % 50 for index in range(70)]
    wanted = request(prompt, 6, temperature=1.5, seed=11, n=3)

    async def main():
        async with running(3) as engine:
            return await answers(engine, wanted), (await engine.stats()).session

    found, session = run(main)
    assert session.prefill_tokens == len(prompt)
    assert [answer["token_ids"] for answer in found] == [alone(request(prompt, 6, temperature=1.5, seed=11 + i))[0] for i in range(3)]
    cached = [answer["completion_usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found]
    assert cached == [0, len(prompt), len(prompt)]


def test_prompts_of_several_clients_run_what_they_share_once():
    system = [5 + index % 50 for index in range(60)]
    prompts = [[*system, 70 + client] for client in range(4)]

    async def main():
        pace = Pace().hold()
        async with running(4, pace=pace) as engine:
            tasks = [asyncio.create_task(answers(engine, request(prompt, 4))) for prompt in prompts]
            while (await engine.stats()).waiting < len(prompts):
                await asyncio.sleep(0)
            pace.go()
            found = await asyncio.gather(*tasks)
            return [answer["token_ids"] for [answer] in found], (await engine.stats()).session

    found, session = run(main)
    assert session.prefill_tokens == len(system) + len(prompts)
    assert found == [alone(request(prompt, 4))[0] for prompt in prompts]


def test_log_probabilities_of_prompt_and_answer():
    wanted = {**request([5, 6, 7, 8], 3), "output_options": {"logprobs": 2, "prompt_logprobs": 1}}

    async def main():
        async with running(2) as engine:
            return await answers(engine, wanted)

    [answer] = run(main)
    with source(1)() as session:
        [score] = session.score([wanted["token_ids"]], top_logprobs=1)
        events = list(session.generate([5, 6, 7, 8], max_new_tokens=3, ignore_eos=True, logprobs=2))
    assert answer["prompt_logprobs"].tokens == (5, 6, 7, 8)
    assert answer["prompt_logprobs"].logprobs[1:] == pytest.approx(score.logprobs[1:], rel=1e-4)
    assert answer["log_probs"] == pytest.approx([event.logprob for event in events], rel=1e-4)
    assert [[one["token_id"] for one in top] for top in answer["top_logprobs"]] == [[t for t, _ in event.top_logprobs] for event in events]


def test_a_prompt_is_scored_without_an_answer():
    async def main():
        async with running(2) as engine:
            return await answers(engine, {**request([5, 6, 7], 0), "output_options": {"prompt_logprobs": 0}})

    [answer] = run(main)
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([], "", "length")
    assert answer["completion_usage"]["completion_tokens"] == 0
    assert len(answer["prompt_logprobs"].logprobs) == 3


def test_without_a_limit_an_answer_fills_its_slot():
    async def main():
        async with running(1, max_sequence_length=16) as engine:
            return await answers(engine, request([5, 6, 7], None))

    [answer] = run(main)
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (14, "length")


def test_leaving_the_iteration_frees_the_slot_within_a_step():
    async def main():
        pace = Pace().hold()
        async with running(1, pace=pace) as engine:
            pace.allow(3)
            async with aclosing(engine.generate(request([5], 100))) as chunks:
                async for _ in chunks:
                    break
            before = (await engine.stats()).session.decode_tokens
            assert engine.num_live == 0
            pace.go()
            await answers(engine, request([6], 2))
            stats = await engine.stats()
            assert stats.session.decode_tokens <= before + 2
            assert await held_slots(engine) == 0

    run(main)


def test_a_cancelled_task_frees_the_slot_and_its_place_in_the_queue():
    async def main():
        pace = Pace().hold()
        async with running(1, max_queue=2, pace=pace) as engine:
            pace.allow(3)
            tasks = [asyncio.create_task(answers(engine, request([5 + index], 120))) for index in range(3)]
            while not (await engine.stats()).slots:
                await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await answers(engine, request([9], 1))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pace.go()
            [answer] = await answers(engine, request([9], 3))
            assert answer["token_ids"] == alone(request([9], 3))[0]
            assert engine.num_live == 0

    run(main)


def test_abort_ends_a_request_by_its_context():
    async def main():
        pace = Pace().hold()
        async with running(2, pace=pace) as engine:
            pace.allow(3)
            context = RequestContext("mine")
            found = []
            async for chunk in engine.generate(request([5], 100), context):
                found.append(chunk)
                if len(found) == 1:
                    with pytest.raises(ConfigError, match="expected an id that no live request has, got 'mine'"):
                        await answers(engine, request([5], 1), RequestContext("mine"))
                    await engine.abort(context)
                    await engine.abort(RequestContext("another"))
            assert found[-1]["finish_reason"] == "cancelled"
            assert sum(len(chunk["token_ids"]) for chunk in found) == found[-1]["completion_usage"]["completion_tokens"] < 100
            await engine.abort(context)
            assert engine.num_live == 0

    run(main)


def test_abort_ends_a_request_that_is_being_submitted():
    async def main():
        pace = Pace().hold()
        async with running(2, pace=pace) as engine:
            context = RequestContext("mine")
            task = asyncio.create_task(answers(engine, request([5], 100), context))
            await asyncio.sleep(0)
            assert engine.num_live == 1
            await engine.abort(context)
            [answer] = await task
            assert (answer["finish_reason"], answer["token_ids"]) == ("cancelled", [])
            pace.go()
            [again] = await answers(engine, request([5], 3), context)
            assert len(again["token_ids"]) == 3

    run(main)


def test_the_queue_is_bounded_and_says_when_to_try_again():
    async def main():
        pace = Pace().hold()
        async with running(1, max_queue=1, pace=pace) as engine:
            tasks = [asyncio.create_task(answers(engine, request([5 + index], 60))) for index in range(2)]
            await asyncio.sleep(0)
            with raises(QueueFullError, "queue", expected="room for 1 more of 2 requests", got=0) as caught:
                await answers(engine, request([9], 1))
            assert caught.value.retry_after >= 1
            with pytest.raises(QueueFullError, match="room for 3 more of 2"):
                await answers(engine, request([9], 1, n=3))
            pace.go()
            for [answer] in await asyncio.gather(*tasks):
                assert len(answer["token_ids"]) == 60

    run(main)


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ({"token_ids": []}, ShapeError, "token_ids: expected the ids of at least one token"),
        ({"token_ids": "text"}, ShapeError, "token_ids: expected the ids of at least one token"),
        ({"token_ids": [320]}, RangeError, "expected an integer from 0 to 319, got 320"),
        ({"token_ids": [5] * 129}, CapacityError, "exceeds max_sequence_length=128"),
        ({"token_ids": [5], "sampling_options": {"temprature": 1}}, ConfigError, "sampling_options: expected .*, got temprature"),
        ({"token_ids": [5], "stop_conditions": 3}, ConfigError, "stop_conditions: expected a mapping, got int"),
        ({"token_ids": [5], "priority": 3}, ConfigError, "request: expected .*, got priority"),
        ({"token_ids": [5], "sampling_options": {"top_p": 0}}, RangeError, "top_p"),
        ({"token_ids": [5], "sampling_options": {"n": 0}}, RangeError, "n: expected"),
        ({"token_ids": [5], "stop_conditions": {"max_tokens": -1}}, RangeError, "max_tokens"),
        ({"token_ids": [5], "output_options": {"prompt_logprobs": -1}}, RangeError, "prompt_logprobs"),
        (
            {"token_ids": [5], "sampling_options": {"guided_decoding": {"json": {"type": 3}}}},
            ConfigError,
            "expected a grammar that compiles",
        ),
        ({"token_ids": [5], "sampling_options": {"guided_decoding": {"yaml": ""}}}, ConfigError, "guided decoding: expected one of json"),
    ],
)
def test_what_is_not_possible_is_refused_and_nothing_has_begun(wanted, error, text):
    if "guided_decoding" in str(wanted):
        pytest.importorskip("llguidance")

    async def main():
        async with running(1) as engine:
            with pytest.raises(error, match=text):
                await answers(engine, wanted)
            stats = await engine.stats()
            assert (engine.num_live, stats.waiting, stats.slots, stats.session.prefill_tokens) == (0, 0, (), 0)

    run(main)


def test_a_request_that_lasts_too_long_is_cancelled():
    async def main():
        pace = Pace().hold()
        async with running(1, max_seconds=0.05, pace=pace) as engine:
            pace.allow(3)
            with pytest.raises(TimeoutError, match=r"expected to end within 0\.05 seconds"):
                await answers(engine, request([5], 100))
            assert engine.num_live == 0
            pace.go()
            while (await engine.stats()).slots:
                pass

    run(main)


def test_a_drain_lets_what_runs_end_and_takes_nothing_new():
    async def main():
        pace = Pace().hold()
        async with running(1, pace=pace) as engine:
            tasks = [asyncio.create_task(answers(engine, request([5 + index], 30))) for index in range(3)]
            await asyncio.sleep(0)
            drain = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(ClosedError, match="takes no new requests"):
                await answers(engine, request([9], 1))
            assert not drain.done()
            pace.go()
            await drain
            assert engine.num_live == 0
            assert [len(answer["token_ids"]) for [answer] in await asyncio.gather(*tasks)] == [30] * 3

    run(main)


def test_a_drain_with_a_limit_cancels_what_is_left():
    async def main():
        pace = Pace().hold()
        async with running(1, pace=pace) as engine:
            pace.allow(3)
            task = asyncio.create_task(answers(engine, request([5], 120)))
            while not (await engine.stats()).slots:
                pass
            await engine.drain(0)
            [answer] = await task
            assert answer["finish_reason"] == "cancelled"
            assert len(answer["token_ids"]) <= 3

    run(main)


def test_a_drain_with_a_limit_cancels_what_is_being_submitted():
    release = threading.Event()

    async def main():
        async with running(1) as engine:
            held = asyncio.create_task(engine._thread.run(lambda _: release.wait(60)))
            task = asyncio.create_task(answers(engine, request([5], 120)))
            await asyncio.sleep(0)
            await engine.drain(0)
            release.set()
            [answer] = await task
            assert await held
            assert answer["finish_reason"] == "cancelled"

    run(main)


def test_a_slow_reader_gets_several_tokens_at_once_and_holds_nobody_up():
    async def main():
        async with running(2) as engine:
            async with aclosing(engine.generate(request([5], 40))) as slow:
                first = await anext(slow)
                [other] = await answers(engine, request([6], 60))
                assert len(other["token_ids"]) == 60
                rest = [chunk async for chunk in slow]
            assert len(rest) < 39
            return [token for chunk in (first, *rest) for token in chunk["token_ids"]]

    assert run(main) == alone(request([5], 40))[0]


def test_a_second_turn_runs_only_its_new_tokens():
    async def main():
        async with running(1, prompt_cache_bytes=1 << 20) as engine:
            [first] = await answers(engine, request([5, 6, 7], 5))
            before = (await engine.stats()).session.prefill_tokens
            turn = [5, 6, 7, *first["token_ids"], 9, 9]
            [second] = await answers(engine, request(turn, 5))
            assert second["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
            stats = await engine.stats()
            assert stats.session.prefill_tokens - before == len(turn) - 7
            assert (stats.prompt_cache_hits, stats.prompt_cache_misses) == (1, 1)
            return second["token_ids"], alone(request(turn, 5))[0]

    found, expected = run(main)
    assert found == expected


def test_text_of_a_schema_can_be_read():
    pytest.importorskip("llguidance")
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"], "additionalProperties": False}

    async def main():
        async with running(2) as engine:
            wanted = {"token_ids": [5, 6], "sampling_options": {"temperature": 1.5, "seed": 3, "n": 3, "guided_decoding": {"json": schema}}}
            plain = request([7, 8], 12)
            found, [other] = await asyncio.gather(answers(engine, wanted), answers(engine, plain))
            assert other["token_ids"] == alone(plain)[0]
            return found

    for answer in run(main):
        assert answer["finish_reason"] == "stop"
        assert isinstance(json.loads(answer["text"])["a"], int)


def test_a_failed_start_says_why():
    async def main():
        engine = AsyncEngine(source(1, max_sequence_length=100_000), model="tiny")
        with pytest.raises(ConfigError):
            await engine.start()
        await engine.cleanup()

    run(main)


def test_errors_name_the_engine_before_its_start_and_after_its_end():
    async def main():
        engine = AsyncEngine(source(1), model="tiny")
        with raises(ClosedError, "this AsyncEngine", expected="start() first"):
            await engine.stats()
        await engine.start()
        await engine.cleanup()
        with pytest.raises(ClosedError, match=r"^this AsyncEngine is closed\.$"):
            await engine.stats()

    run(main)


def test_guided_text_is_the_same_with_a_tokenizer_that_training_left_padding_in(tmp_path):
    pytest.importorskip("llguidance")
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 5, "pad_type_id": 0, "pad_token": "a"}
    data = json.loads((MODEL / "tokenizer.json").read_text()) | {"truncation": truncation, "padding": padding}
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    wanted = {"token_ids": [5, 6], "sampling_options": {"guided_decoding": {"choice": ["The White Rabbit was late"]}}}

    async def main():
        found = []
        for folder in (MODEL, tmp_path):
            options = {"max_batch_size": 1, "max_sequence_length": 64, "dtype": "float32"}
            engine = AsyncEngine(SessionSource(folder, engine="reference", **options), model="tiny")
            await engine.start()
            found += await answers(engine, wanted)
            await engine.cleanup()
        return found

    plain, padded = run(main)
    assert padded == plain
    assert plain["text"] == "The White Rabbit was late"
