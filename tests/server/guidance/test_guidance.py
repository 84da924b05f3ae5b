"""Guided decoding in worker processes: what a grammar costs, it costs its own request only."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import aclosing

import numpy as np
import psutil
import pytest

from tests.helpers.assertions import raises
from tests.server.engines import MODEL, alone, answers, request, run, running
from tests.server.guidance.grammars import CHAINED, CHOICE, ENDLESS, SLOW, guided
from tests.server.needs_libraries import need_libraries
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.errors import ClosedError, ConfigError, ProcessorError, RangeError
from trt_kvcache.server import Guidance, GuidanceOptions
from trt_kvcache.server.async_engine import RequestContext
from trt_kvcache.server.guidance.grammar import Grammar

need_libraries("psutil")

QUICK = GuidanceOptions(compile_seconds=0.2, mask_seconds=0.2)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(MODEL)


@pytest.fixture(scope="module")
def guidance(tokenizer):
    with Guidance(tokenizer, 320, [1], options=QUICK) as opened:
        yield opened


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (CHAINED, r"grammar start: r0 .*\.\.\.: expected a grammar that llguidance can take, but it has crashed"),
        (ENDLESS, r'json {"type": "integer", "multipleOf": 99999989}: expected a grammar that compiles within 0\.2 seconds'),
        ({"json": {"$ref": "#"}}, "expected a grammar that a text fits, got one that no text fits"),
        ({"regex": r"[^\s\S]"}, "expected a grammar that a text fits, got one that no text fits"),
        ({"grammar": "start: start"}, "expected a grammar that a text fits, got one that no text fits"),
        ({"grammar": "start: {"}, "expected a grammar that compiles, got an error"),
        ({"json": "{"}, "expected a grammar that compiles, got an error"),
        ({"regex": "("}, r"regex \(: expected a grammar that compiles, got an error"),
        ({"choice": []}, "choice: expected texts"),
        ({"regex": 3}, "regex: expected a text, got 3"),
        ({"json": {}, "regex": "a"}, "expected one of json"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_and_says_why(guidance, grammar, text):
    with pytest.raises(ConfigError, match=f"guided decoding: .*{text}"):
        guidance.processor(grammar)
    assert guidance.processor(CHOICE)


def test_one_that_takes_too_much_memory_is_refused(tokenizer):
    small = GuidanceOptions(compile_seconds=30, memory_mib=20)
    with Guidance(tokenizer, 320, [1], options=small) as guidance, pytest.raises(ConfigError, match="takes at most 20 MiB of memory"):
        guidance.processor(ENDLESS)


def test_one_that_has_hurt_is_refused_at_once_the_next_time(guidance):
    guidance.processor(CHOICE)
    grammar, hurt = {"json": {**ENDLESS["json"], "title": "again"}}, guidance.worker_pids
    with pytest.raises(ConfigError, match="compiles within"):
        guidance.processor(grammar)
    wait_for_another_worker(guidance, hurt)
    pids = guidance.worker_pids
    with pytest.raises(ConfigError, match="compiles within"):
        guidance.processor(grammar)
    assert guidance.worker_pids == pids


def wait_for_another_worker(guidance, before):
    """Wait for the worker that replaces one that was ended."""
    ends = time.monotonic() + 30
    while not set(guidance.worker_pids) - set(before):
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_no_process_starts_before_the_first_grammar(tokenizer):
    with Guidance(tokenizer, 320, [1]) as guidance:
        assert guidance.worker_pids == []
        guidance.processor(CHOICE)
        [pid] = guidance.worker_pids
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_worker_that_was_killed_is_replaced_before_it_is_needed(guidance):
    guidance.processor(CHOICE)
    before = guidance.worker_pids
    with pytest.raises(ConfigError, match="crashed"):
        guidance.processor({"grammar": CHAINED["grammar"] + "\n\n"})
    wait_for_another_worker(guidance, before)


@pytest.mark.skipif(not hasattr(os, "nice"), reason="priorities of POSIX")
def test_workers_have_a_low_priority_and_leave_a_processor_alone(guidance):
    guidance.processor(CHOICE)
    for pid in guidance.worker_pids:
        worker = psutil.Process(pid)
        assert worker.nice() >= 5
        if hasattr(os, "sched_getaffinity"):
            assert len(os.sched_getaffinity(pid)) == max(1, len(os.sched_getaffinity(0)) - 1)


def test_a_mask_behind_fewer_tokens_than_before_is_the_same(guidance, tokenizer):
    mask = guidance.processor({"regex": "[a-c][d-f][g-i]*"})

    def of(*tokens):
        logits = mask((9, *tokens), np.zeros(320, np.float32))
        return set(np.flatnonzero(np.isfinite(logits)))

    first, a, d = of(), *(token_of(tokenizer, text) for text in "ad")
    second, third = of(a), of(a, d)
    assert a in first - second
    assert d in second - third
    assert [of(a), of(), of(a, d)] == [second, first, third]


def token_of(tokenizer, text):
    return tokenizer.encode(text, False)[0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_text_ends_when_its_grammar_does(ignore_eos):
    async def main():
        async with running(2) as engine:
            return await answers(engine, guided(CHOICE, ignore_eos=ignore_eos))

    [answer] = run(main)
    assert (answer["text"] in CHOICE["choice"], answer["finish_reason"]) == (True, "stop")


def test_a_text_that_ignores_the_end_goes_on_as_long_as_its_grammar():
    async def main():
        async with running(2) as engine:
            bias = {"1": 50.0}
            return [await answers(engine, guided({"regex": "[a-d]*"}, 12, ignore_eos=late, logit_bias=bias)) for late in (False, True)]

    [[ends], [goes_on]] = run(main)
    assert (ends["text"], ends["finish_reason"]) == ("", "stop")
    assert (len(goes_on["token_ids"]), goes_on["finish_reason"]) == (12, "length")


def test_a_mask_that_takes_too_long_ends_its_request_and_names_its_grammar():
    async def main():
        async with running(2, guidance=GuidanceOptions(mask_seconds=0.02), max_sequence_length=512) as engine:
            slow, other = await asyncio.gather(
                answers(engine, guided(SLOW, 400, ignore_eos=True)), answers(engine, request([7, 8], 100)), return_exceptions=True
            )
            return slow, other[0]["token_ids"], await answers(engine, guided(CHOICE))

    slow, other, [again] = run(main)
    assert isinstance(slow, ProcessorError)
    assert 'grammar start: e e: e e e | e e | "a" | "b" | /./: expected a grammar that has its next mask within 0.02 seconds' in str(slow)
    assert other == alone(request([7, 8], 100))[0]
    assert again["finish_reason"] == "stop"


def test_answers_of_one_grammar_are_those_of_following_seeds():
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"], "additionalProperties": False}

    async def main():
        async with running(2) as engine:
            together = await answers(engine, guided({"json": schema}, n=4, seed=3, temperature=2.0))
            return together, [(await answers(engine, guided({"json": schema}, seed=3 + i, temperature=2.0)))[0] for i in range(4)]

    together, one_by_one = run(main)
    assert [answer["token_ids"] for answer in together] == [answer["token_ids"] for answer in one_by_one]
    assert all(json.loads(answer["text"])["a"] in (1, 22, 333) for answer in together)


def test_stop_texts_penalties_and_log_probabilities_go_with_a_grammar():
    wanted = guided({"regex": "[a-z ]+"}, 20, ignore_eos=True, stop=["e"], frequency_penalty=0.5, temperature=1.5, seed=4)

    async def main():
        async with running(2) as engine:
            return await answers(engine, {**wanted, "output_options": {"logprobs": 1}})

    [answer] = run(main)
    assert answer["finish_reason"] == "stop"
    assert "e" not in answer["text"]
    assert len(answer["log_probs"]) == len(answer["token_ids"])


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_workers_that_are_killed_cost_no_request():
    wanted = [guided({"regex": "[a-z ]*"}, 60, ignore_eos=True, seed=seed, temperature=1.5) for seed in range(4)]

    async def main():
        async with running(4) as engine:
            expected = [await answers(engine, one) for one in wanted]
            tasks = [asyncio.create_task(answers(engine, one)) for one in wanted]
            killed = 0
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.3)
                for pid in engine._guidance.worker_pids if killed < 3 else ():
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            assert killed
            return expected, await asyncio.gather(*tasks)

    expected, found = run(main)
    assert [answer["token_ids"] for [answer] in found] == [answer["token_ids"] for [answer] in expected]


def test_a_request_that_leaves_while_its_grammar_compiles_frees_the_worker():
    async def main():
        async with running(2, guidance=GuidanceOptions(compile_seconds=60)) as engine:
            context = RequestContext("mine")
            aborted = asyncio.create_task(answers(engine, guided(ENDLESS), context))
            cancelled = asyncio.create_task(answers(engine, guided({"json": {**ENDLESS["json"], "title": "another"}})))
            while len(engine._guidance.worker_pids if engine._guidance else ()) < 2:
                await asyncio.sleep(0.01)
            cancelled.cancel()
            await engine.abort(context)
            [answer] = await aborted
            assert answer["finish_reason"] == "cancelled"
            while [lane for lane in engine._guidance._pool._lanes if lane.job]:
                await asyncio.sleep(0.01)
            assert (await answers(engine, guided(CHOICE)))[0]["finish_reason"] == "stop"
            assert engine.num_live == 0

    run(main)


def test_a_limit_of_seconds_ends_a_request_that_compiles():
    async def main():
        async with running(2, max_seconds=0.3, guidance=GuidanceOptions(compile_seconds=60)) as engine:
            with pytest.raises(TimeoutError, match=r"expected to end within 0\.3 seconds"):
                await answers(engine, guided(ENDLESS))
            assert engine.num_live == 0

    run(main)


def test_leaving_a_request_that_waits_for_its_mask_frees_its_slot():
    async def main():
        async with running(1, guidance=GuidanceOptions(mask_seconds=60), max_sequence_length=512) as engine:
            async with aclosing(engine.generate(guided(SLOW, 500, ignore_eos=True))) as chunks:
                tokens = 0
                async for chunk in chunks:
                    tokens += len(chunk["token_ids"])
                    if tokens > 10:
                        break
            [answer] = await answers(engine, request([7, 8], 5))
            assert answer["token_ids"] == alone(request([7, 8], 5))[0]

    run(main)


def test_closing_ends_workers_in_the_middle_of_a_grammar(tokenizer):
    guidance = Guidance(tokenizer, 320, [1], options=GuidanceOptions(compile_seconds=60))
    mask = guidance.begin(Grammar(ENDLESS)).compile()
    while not guidance.worker_pids:
        time.sleep(0.01)
    pids = guidance.worker_pids
    guidance.close()
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(ClosedError):
        mask.result(10)
    with pytest.raises(ClosedError):
        guidance.processor(CHOICE)


def test_a_model_without_an_end_token_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="expected a model with an end token, got one without"):
        Guidance(tokenizer, 320, [])


def test_options_are_checked():
    with raises(RangeError, "GuidanceOptions.compile_seconds", expected="above 0", got=0):
        GuidanceOptions(compile_seconds=0)
