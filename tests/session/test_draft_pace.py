"""Drafts pause where steps with drafts give fewer tokens per second."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trt_kvcache.session.draft_pace import DraftPace


class Steps:
    """Simulates decode steps with known durations. A step verifies drafts if ``DraftPace`` allows them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = DraftPace(lambda: self.now)

    def run(self, count: int, *, plain: float, drafted: float, tokens: int, running: int = 1) -> list[bool]:
        """Return whether each step had drafts, which add ``tokens - running`` tokens."""
        found = []
        for _ in range(count):
            found.append(self.pace.allows(running))
            self.now += drafted if found[-1] else plain
            self.pace.count(running, tokens if found[-1] else running, drafted=found[-1])
        return found


def test_drafts_that_pay_run_in_every_step_but_the_first():
    found = Steps().run(100, plain=1.0, drafted=1.9, tokens=2)
    assert found == [False] * 4 + [True] * 96


@pytest.mark.parametrize(("drafted", "tokens", "running"), [(2.1, 2, 1), (3.0, 10, 4)])
def test_drafts_that_do_not_pay_are_tried_less_and_less(drafted, tokens, running):
    steps = Steps()
    found = steps.run(3000, plain=1.0, drafted=drafted, tokens=tokens, running=running)
    assert 40 <= sum(found) <= 80
    assert steps.now < 3000 * 1.05 + 10
    tried = [place for place in range(1, 3000) if found[place] and not found[place - 1]]
    assert [later - earlier for earlier, later in pairwise(tried)][:5] == [40, 72, 136, 264, 520]


def test_a_text_that_becomes_easier_has_drafts_again():
    steps = Steps()
    steps.run(300, plain=1.0, drafted=2.0, tokens=1)
    found = steps.run(800, plain=1.0, drafted=2.0, tokens=4)
    assert all(found[-200:])


def test_slow_steps_now_and_then_do_not_matter():
    """Those of a prompt, or of a graph that is captured."""
    steps = Steps()
    found = []
    for number in range(400):
        found += steps.run(1, plain=1.0, drafted=50.0 if number % 6 == 0 else 1.5, tokens=3)
    assert all(found[6:])


def test_each_number_of_requests_has_an_answer_of_its_own():
    steps = Steps()
    assert not all(steps.run(50, plain=1.0, drafted=3.0, tokens=2)[4:])
    assert all(steps.run(50, plain=1.0, drafted=1.2, tokens=16, running=8))  # one step takes as long for one request as for eight
    assert not all(steps.run(50, plain=1.0, drafted=3.0, tokens=16, running=8))


def test_time_between_steps_of_other_numbers_of_requests_is_not_counted():
    steps = Steps()
    for number in range(200):
        steps.run(1, plain=1.0, drafted=1.2, tokens=3, running=1 + number % 2)
    assert not steps.run(1, plain=1.0, drafted=1.2, tokens=3)[0]  # no step has followed one of as many requests
