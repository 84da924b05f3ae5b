"""Logits processors that are not ready when the logits are: the slot waits, the others go on, and nothing runs twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.helpers.recording import poison
from tests.helpers.sessions import ahead, alone, drain, make, outcome
from tests.paths import GOLDEN, ROOT
from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import ProcessorError
from trt_kvcache.generation.sampling import DeferredProcessor

S = 16
MODELS = {"attention": ROOT / "examples" / "tiny-llama", "hybrid": GOLDEN / "lfm2", "states": GOLDEN / "mamba2"}
every_model = pytest.mark.parametrize("folder", MODELS.values(), ids=MODELS)


class Late(DeferredProcessor):
    """Changes nothing, and is ready when it has been asked ``delay(n)`` more times after n tokens; fails after ``fails`` tokens."""

    def __init__(self, delay=lambda count: 2, fails=None):
        self.delay, self.fails = delay, fails
        self.asked: dict[int, int] = {}
        self.called: list[int] = []

    def ready(self, tokens, seconds=0.0):
        count = len(tokens)
        self.asked[count] = self.asked.get(count, 0) + 1
        return self.asked[count] > self.delay(count)

    def __call__(self, tokens, logits):
        self.called.append(len(tokens))
        if len(tokens) == self.fails:
            raise ProcessorError("late: failed")
        return logits


def late(count, *args, **options):
    return SamplingParams(max_new_tokens=count, logits_processors=[Late(*args)], **options)


def open_model(folder, slots=3):
    return InferenceSession.from_model(folder, engine="reference", dtype="float32", max_batch_size=slots, max_sequence_length=24)


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans(), st.sampled_from([0, 1 << 12]))
def test_random_delays_change_no_token(seed, slots, on_device, reuse):
    random = np.random.default_rng(seed)
    session = make(slots=slots, limit=S, reuse=reuse)
    if on_device:
        ahead(session)
    handles, asked = [], []
    for _ in range(40):
        what = random.choice(["submit", "step", "cancel", "prefill"], p=[0.3, 0.6, 0.07, 0.03])
        if what == "submit":
            delays = random.integers(0, 4, S + 1)
            params = SamplingParams(max_new_tokens=int(random.integers(1, 9)), temperature=random.choice([0.0, 1.5]), seed=int(seed % 99))
            processors = [Late(lambda count, delays=delays: delays[count])] if random.random() < 0.6 else []
            asked.append((random.integers(0, 3, random.integers(1, S + 1)), params))
            handles.append(session.submit(asked[-1][0], replace(params, logits_processors=processors)))
        elif what == "cancel" and handles:
            random.choice(handles, 1)[0].cancel()
        elif what == "prefill":
            session.prefill([[1, 2]])
        elif what == "step":
            session.step()
            if not on_device:  # the step ahead has written behind the lengths
                poison(session.cache)
    drain(session)
    lonely = make(limit=S)
    for handle, (prompt, params) in zip(handles, asked, strict=True):
        expected = alone(lonely, prompt, params)
        if handle.finish_reason == "cancelled":
            assert handle.tokens == expected[0][: len(handle.tokens)]
        else:
            assert outcome(handle) == expected


@every_model
def test_a_request_that_waits_has_the_tokens_that_it_has_alone_and_nothing_runs_twice(folder):
    options = {"ignore_eos": True, "logprobs": 2}
    with open_model(folder) as session:
        one = session.submit([5, 6, 7], late(9, lambda count: count % 4, **options))
        other = session.submit([9, 8], SamplingParams(max_new_tokens=12, **options))
        drain(session)
        ran = session.statistics
    assert (ran.prefill_tokens, ran.decode_tokens) == (5, 8 + 11)
    with open_model(folder, 1) as session:
        for handle, prompt, count in ((one, [5, 6, 7], 9), (other, [9, 8], 12)):
            events = list(session.generate([prompt], max_new_tokens=count, **options))
            assert handle.tokens == tuple(event.token for event in events)
            assert [event.logprob for event in handle.events] == pytest.approx([event.logprob for event in events], rel=1e-4)


@every_model
def test_the_others_go_on_while_one_waits(folder):
    with open_model(folder) as session:
        waits = session.submit([5, 6, 7], late(4, lambda count: 8 if count == 4 else 0))
        other = session.submit([9, 8], max_new_tokens=9, ignore_eos=True)
        for _ in range(8):
            session.step()
        assert (len(waits.tokens), len(other.tokens)) == (1, 8)


def test_work_begins_before_the_logits_of_its_token_are_computed():
    with make() as session:
        processor = Late(lambda count: 0)
        seen = []
        run = session.engine._run
        session.engine._run = lambda: (seen.append(max(processor.asked)), run())
        session.submit([1, 2, 3], SamplingParams(max_new_tokens=3, logits_processors=[processor]))
        drain(session)
    assert seen == [3, 4, 5]


def test_a_step_in_which_all_wait_says_so():
    with make() as session:
        handle = session.submit([1, 2], late(2, lambda count: 9))
        moved = [session.step() for _ in range(3)]
        assert moved == [[handle]] * 3
        assert not handle.tokens


@every_model
def test_one_that_fails_costs_the_others_no_step(folder):
    with open_model(folder) as session:
        fails = session.submit([5, 6], late(9, lambda count: 0, 4))
        other = session.submit([9, 8], max_new_tokens=6, ignore_eos=True)
        with pytest.raises(ProcessorError, match="late: failed") as error:
            drain(session)
        assert error.value.request == fails.index
        fails.cancel()
        drain(session)
        assert len(other.tokens) == 6
        assert session.statistics.decode_tokens == 5 + 2
        assert session.statistics.prefill_tokens == 4


@every_model
def test_a_slot_that_is_full_waits_and_ends(folder):
    prompt = [5 + index for index in range(22)]
    with open_model(folder) as session:
        full = session.submit(prompt, late(9, lambda count: 4, ignore_eos=True))
        other = session.submit([9, 8], max_new_tokens=14, ignore_eos=True)
        drain(session)
    with open_model(folder, 1) as session:
        alone_full = session.generate([prompt], max_new_tokens=9, ignore_eos=True)
        assert (full.tokens, full.finish_reason) == (tuple(event.token for event in alone_full), "length")
        assert other.tokens == tuple(event.token for event in session.generate([[9, 8]], max_new_tokens=14, ignore_eos=True))


def test_pending_tokens_of_a_full_slot_that_waited_are_all_there():
    with make(slots=2, limit=6) as session:
        handle = session.submit([1, 2, 3, 4, 5, 6], late(2, lambda count: 4))
        session.submit([1], max_new_tokens=5)
        while not handle.finished:
            session.step()
        assert session.tokens(0) + session.pending_tokens(0) == (1, 2, 3, 4, 5, 6, *handle.tokens)


def test_a_step_that_fails_beside_a_full_slot_that_waits_runs_nothing_again():
    """The full slot gives its last token back before the step; the slots are still those of the queue."""
    with make(slots=2, limit=S) as session:
        full = session.submit(range(S), late(2, lambda count: 9))
        for _ in range(4):
            session.step()
        other = session.submit([1], max_new_tokens=5)
        session.step()
        assert len(session.tokens(0)) == S
        run = session.engine._run
        session.engine._run = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            session.step()
        session.engine._run = run
        drain(session)
        assert (len(other.tokens), full.finish_reason) == (5, "length")
        assert session.statistics.prefill_tokens == S + 1


def test_no_slot_is_given_behind_a_full_one_that_waits_and_cannot_be_skipped():
    """No view that begins after the full slot is aligned."""
    with make(slots=2, limit=6) as session:
        full = session.submit([1, 2, 3, 4, 5, 6], late(2, lambda count: 9))
        session.step()
        session.step()
        other = session.submit([1], max_new_tokens=5)
        session.step()
        assert other.state == "queued"
        drain(session)
        assert (len(other.tokens), full.finish_reason) == (5, "length")


def test_generate_waits():
    processor = Late(lambda count: 99)
    with make() as session:
        events = list(session.generate([[1, 2, 3]], SamplingParams(max_new_tokens=3, logits_processors=[processor])))
        assert [event.token for event in events] == [*alone(session, [1, 2, 3], SamplingParams(max_new_tokens=3))[0]]
    assert processor.called == [3, 4, 5]
