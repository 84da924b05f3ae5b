"""The length of the drafts of a step: the one that gives the most tokens per second."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from trt_kvcache.generation.drafting import Drafting
from trt_kvcache.generation.ngram_drafter import NgramDrafter
from trt_kvcache.session.draft_pace import LENGTHS, DraftPace, VerifiedDrafts

Cost = Callable[[int], float]


def linear(verify: float, token: float) -> Cost:
    """Return the seconds of a step by the length of its drafts."""
    return lambda length: verify + token * length if length else 1.0


#: Measured on an H200 with Llama-3-8B: an EAGLE-3 head at batch 1 and 8, a draft model of 1B at batch 1 and 8.
COSTS = {"head": linear(1.13, 0.064), "head, 8": linear(1.2, 0.064), "model": linear(1.13, 0.21), "model, 8": linear(1.2, 0.25)}


class Steps:
    """Simulates decode steps with known durations, and drafts whose tokens are right at a known rate."""

    def __init__(self, requests: int = 1, *, seed: int = 0) -> None:
        self.now, self.tokens = 0.0, 0
        self.pace = DraftPace(measures=True, clock=lambda: self.now)
        self.draftings = [Drafting(NgramDrafter()) for _ in range(requests)]
        self._random = random.Random(seed)

    def run(self, count: int, cost: Cost, rates: Sequence[float], *, proposing: Sequence[float] | None = None) -> list[int]:
        """Run steps and return the lengths of their drafts. ``proposing``: how often each request has a proposal."""
        return [self._step(cost, rates, proposing) for _ in range(count)]

    def _step(self, cost: Cost, rates: Sequence[float], proposing: Sequence[float] | None) -> int:
        running, chance = len(self.draftings), self._random.random
        limit = self.pace.limit(running, self.draftings)
        tried = 0 if limit else self.pace.try_limit(running)
        drafts = [
            (drafting, rate)
            for place, (drafting, rate) in enumerate(zip(self.draftings, rates, strict=True))
            if (limit or tried) and (proposing is None or chance() < proposing[place])
        ]
        length = (limit or tried) if drafts else 0
        if length and not tried and not self.pace.pay(running, [(drafting, length) for drafting, _ in drafts]):
            tried = self.pace.try_limit(running)
            length = length if tried else 0
        self.now += cost(length)
        self.tokens += running
        all_accepted = 0
        for drafting, rate in drafts if length else ():
            accepted = next((place for place in range(length) if chance() >= rate), length)
            drafting.record(length, accepted)
            all_accepted += accepted
        self.tokens += all_accepted
        self.pace.count(running, VerifiedDrafts(length * len(drafts), all_accepted, length), tried=bool(tried))
        return length


def tokens_per_second(length: int, cost: Cost, rate: float) -> float:
    return sum(rate**place for place in range(length + 1)) / cost(length)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("name", COSTS)
def test_steps_are_nearly_as_fast_as_with_the_best_length(name: str, rate: float) -> None:
    cost, requests = COSTS[name], 8 if "8" in name else 1
    best = max(tokens_per_second(length, cost, rate) for length in LENGTHS)
    steps = Steps(requests)
    steps.run(3000, cost, [rate] * requests)
    assert steps.tokens / steps.now / requests >= 0.94 * best


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("name", COSTS)
def test_a_short_answer_is_not_much_slower_than_without_drafts(name: str, rate: float) -> None:
    requests, speeds = 8 if "8" in name else 1, []
    for seed in range(20):
        steps = Steps(requests, seed=seed)
        steps.run(128, COSTS[name], [rate] * requests)
        speeds.append(steps.tokens / steps.now / requests)
    assert sum(speeds) / len(speeds) >= 0.97


def test_the_first_steps_are_without_drafts():
    found = Steps().run(20, COSTS["head"], [0.9])
    assert found[:4] == [0] * 4
    assert all(found[4:])


def test_drafts_that_do_not_pay_are_tried_less_and_less():
    found = Steps().run(3000, COSTS["model"], [0.0])
    tried = [place for place, length in enumerate(found) if length]
    assert [later - earlier for earlier, later in pairwise(tried)][-3:] == [129] * 3
    assert len(tried) < 60


def test_a_text_that_becomes_easier_has_long_drafts_again():
    steps = Steps()
    steps.run(400, COSTS["head"], [0.0])
    assert Counter(steps.run(600, COSTS["head"], [0.95])[-200:]).most_common(1)[0][0] == 15


@pytest.mark.parametrize("rate", [0.8, 0.95, 1.0])
def test_a_step_with_drafts_that_takes_long_whatever_their_length(rate: float) -> None:
    """Prompt lookup with a small model: a step with drafts waits for the host, but a longer draft costs hardly more."""
    cost, steps = linear(2.2, 0.01), Steps()
    steps.run(400, cost, [rate])
    assert steps.tokens / steps.now >= 0.85 * max(tokens_per_second(length, cost, rate) for length in LENGTHS)


def test_a_part_of_a_text_that_repeats_another_one_is_noticed_soon() -> None:
    cost, steps = linear(2.2, 0.01), Steps()
    steps.run(600, cost, [0.1])
    found = steps.run(150, cost, [1.0])
    first = next(place for place, length in enumerate(found) if length)
    assert found[first : first + 16].count(15) >= 6


def test_slow_steps_now_and_then_do_not_matter():
    """Those of a prompt, or of a graph that is captured."""
    steps, found = Steps(), []
    for number in range(400):
        found += steps.run(1, lambda length, slow=number % 6 == 0: 50.0 if slow else COSTS["head"](length), [0.8])
    assert sum(map(bool, found[-300:])) >= 280


def test_a_length_is_left_once_it_is_found_to_be_slow():
    """Steps of more than 4 rows take much longer than shorter ones let expect."""
    steps = Steps()
    found = steps.run(300, lambda length: 6.0 if length > 3 else COSTS["head"](length), [0.9])
    assert Counter(found[-200:]).most_common(1)[0][0] == 3


def test_requests_of_a_step_have_one_length_that_is_best_for_all():
    cost = linear(1.15, 0.2)
    one = Steps(8)
    found = one.run(1500, cost, [0.95, *[0.0] * 7])
    assert sum(map(bool, found[100:])) < 100, "a step of eight for the drafts of one"
    most = Steps(8)
    assert sum(map(bool, most.run(500, cost, [*[0.95] * 7, 0.0])[100:])) >= 380


def test_times_are_those_of_as_many_requests():
    steps = Steps(1)
    steps.run(100, COSTS["head"], [0.9])
    steps.draftings = [Drafting(NgramDrafter()) for _ in range(8)]
    found = steps.run(600, lambda length: 1.0 + 2.0 * length, [0.9] * 8)
    assert sum(map(bool, found[100:])) < 60
    steps.draftings = steps.draftings[:1]
    for _ in range(50):
        steps.draftings[0].record(1, 1)
    assert all(steps.run(50, COSTS["head"], [0.9])[4:])


def test_time_between_steps_of_other_numbers_of_requests_is_not_counted():
    steps = Steps()
    both = [Drafting(NgramDrafter()) for _ in range(2)]
    for number in range(200):
        steps.draftings = both[: 1 + number % 2]
        assert steps.run(1, COSTS["head"], [0.9] * len(steps.draftings)) == [0]  # no step has followed one of as many requests


def test_time_since_a_step_that_is_not_counted_is_not_that_of_a_step():
    steps = Steps()
    found = []
    for _ in range(60):
        steps.now += 100.0  # requests without drafts
        steps.pace.skip()
        found += steps.run(2, COSTS["model"], [0.5])
    assert max(found[-60:]) <= 3


def test_requests_without_drafts_count_too():
    pace, drafting = DraftPace(measures=False), Drafting(NgramDrafter())
    assert pace.limit(1, [drafting]) > 0
    assert pace.limit(64, [drafting]) == 0
    assert pace.limit(3, []) == 0
    assert pace.pay(1, [(drafting, 3)])
    assert not pace.pay(64, [(drafting, 3)])


def test_requests_that_seldom_propose_do_not_slow_others_down() -> None:
    cost, steps = linear(1.2, 0.06), Steps(8)
    steps.run(3000, cost, [0.7] * 8, proposing=[0.1] * 8)
    assert steps.tokens / steps.now / 8 >= 0.98


def test_one_request_of_eight_that_repeats_a_text_is_noticed() -> None:
    cost, steps = linear(1.2, 0.01), Steps(8)
    steps.run(100, cost, [0.5] * 8, proposing=[0.0] * 8)
    found = steps.run(200, cost, [1.0] * 8, proposing=[1.0, *[0.0] * 7])
    assert sum(map(bool, found[-60:])) > 50


def test_steps_without_drafts_that_were_slow_for_a_while_are_measured_again() -> None:
    cost, steps = linear(2.2, 0.01), Steps()
    steps.run(200, cost, [0.0])
    steps.run(16, lambda length: cost(length) + 2.0, [0.0])  # something else has used the GPU
    before = steps.now
    steps.run(600, cost, [0.0])
    assert 600 / (steps.now - before) >= 0.7


def test_a_drafter_that_proposes_less_than_it_may_is_not_believed_to_propose_more() -> None:
    """Each step brings one token at three times the cost of a step without drafts, though all drafts are accepted."""
    cost, pace, drafting, now, tokens = linear(3.0, 0.01), DraftPace(measures=False), Drafting(NgramDrafter()), 0.0, 0
    pace._seconds = lambda running: {length: cost(length) for length in LENGTHS}
    for _ in range(400):
        limit = pace.limit(1, [drafting])
        tried = 0 if limit else pace.try_limit(1)
        is_verified = bool(limit or tried) and (bool(tried) or pace.pay(1, [(drafting, 1)]))
        if not is_verified and limit:
            tried = pace.try_limit(1)
            is_verified = bool(tried)
        if is_verified:
            drafting.record(1, 1)
        now, tokens = now + cost(int(is_verified)), tokens + 1 + is_verified
        pace.count(1, VerifiedDrafts(1, 1, 1) if is_verified else VerifiedDrafts(), tried=bool(tried))
    assert tokens / now >= 0.9


def test_a_draft_of_more_tokens_than_any_limit() -> None:
    pace, drafting = DraftPace(measures=False), Drafting(NgramDrafter())
    for _ in range(40):
        drafting.record(15, 15)
    assert pace.pay(1, [(drafting, 40)])  # its time is taken to be that of the longest limit
    pace.count(1, VerifiedDrafts(40, 0, 40))
    assert pace.limit(1, [drafting]) == LENGTHS[-1]


def test_a_clock_that_stands_still_ends_nothing():
    """All steps take as long, so the longest drafts are best."""
    steps = Steps(2)
    assert steps.run(200, lambda length: 0.0, [0.9, 0.9])[-1] == LENGTHS[-1]


def test_steps_with_prompts_count_only_where_there_are_no_others():
    """A server under load may run a part of a prompt in every step."""
    pace, now = DraftPace(measures=True, clock=lambda: now[0]), [0.0]

    def run(seconds: float, *, has_prompt: bool) -> None:
        now[0] += seconds
        pace.count(1, VerifiedDrafts(), has_prompt=has_prompt)

    for _ in range(5):
        run(3.0, has_prompt=True)
    assert pace._known(0, 1) == pytest.approx(3.0)
    assert pace.limit(1, [Drafting(NgramDrafter())]) == 1
    pace = DraftPace(measures=True, clock=lambda: now[0])
    for _ in range(5):
        run(1.0, has_prompt=False)
    for _ in range(16):
        run(3.0, has_prompt=True)
    assert pace._known(0, 1) == pytest.approx(1.0)


def test_without_measuring_no_time_is_read():
    pace, drafting = DraftPace(measures=False, clock=lambda: 1 / 0), Drafting(NgramDrafter())
    assert pace.limit(1, [drafting]) == 3
    pace.count(1, VerifiedDrafts(3, 1, 3))
    pace.count(1, VerifiedDrafts())


def test_times_are_measured_again_after_some_hundred_steps():
    steps = Steps()
    found = steps.run(2000, COSTS["head"], [0.9])
    plain = [place for place, length in enumerate(found) if not length]
    assert len(plain) < 60
    assert max(later - earlier for earlier, later in pairwise(plain)) < 140
