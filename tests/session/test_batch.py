"""``Batch`` and ``Runner``: what the slots hold and what the cache says change together or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.recording import logits_after
from tests.helpers.sessions import make
from tests.session.every_logit import with_every_logit
from trt_kvcache.errors import CapacityError, EngineError, RangeError, ShapeError
from trt_kvcache.session.slots import Slot
from trt_kvcache.session.step_plan import LogitsWanted, StepPlan


@pytest.fixture
def session():
    """Three slots: slot 1 has a pending token of a sampler."""
    with make() as session:
        session.prefill([[1, 2, 3], [4, 5], [6]])
        choose(session, 1, 20, (7, 1))
        yield session


@pytest.fixture
def batch(session):
    return session._batch


@pytest.fixture
def runner(session):
    return session._runner


def choose(session, slot, token, sampler):
    """Make a token pending in a slot."""
    slots = [*session._runner.slots]
    slots[slot] = slots[slot].chosen(token, sampler, 1)
    session._runner.note(slots)


def fields_of(slot):
    return slot.tokens, slot.pending, slot.reused, slot.sampler


def states(runner):
    """What the slots hold, and the lengths that the cache has for them."""
    return [fields_of(slot) for slot in runner.slots], runner.checked_lengths()


def fail_after(runner, change):
    """Work that fails after a change that was not applied."""

    def run():
        with runner.work():
            change()
            raise EngineError("no")

    with pytest.raises(EngineError, match=r"^no$"):
        run()


def test_a_slot_is_one_value(batch):
    assert fields_of(batch[1]) == ([4, 5], (20,), 0, (7, 1))
    assert (len(batch), batch.held, batch.reused) == (3, [3, 2, 1], [0, 0, 0])


def test_a_chosen_token_is_pending_and_changes_nothing_in_the_cache(session, runner):
    choose(session, 0, 9, (5, 3))
    assert (runner.slots[0].pending, runner.slots[0].sampler) == ((9,), (5, 3))
    assert states(runner)[1] == (3, 2, 1)


def test_a_decode_step_takes_the_place_of_pending_tokens_of_the_slots_that_take_part(session):
    choose(session, 2, 21, None)
    after = StepPlan.of([[8], [20], []]).applied(session._runner.slots)
    assert [(slot.tokens, slot.pending) for slot in after] == [([1, 2, 3, 8], ()), ([4, 5, 20], ()), ([6], (21,))]
    assert [slot.generated for slot in after] == [0, 1, 1]
    assert after[1].sampler == (7, 1)


def test_values_that_share_a_row_do_not_see_each_other(runner):
    before = runner.slots[0]
    one, other = before.extended([8, 9]), before.extended([10])
    assert (before.tokens, one.tokens, other.tokens) == ([1, 2, 3], [1, 2, 3, 8, 9], [1, 2, 3, 10])
    assert one.shortened(2).extended([7]).tokens == [1, 2, 7]
    assert one.tokens == [1, 2, 3, 8, 9]


def test_work_that_fails_leaves_slots_and_lengths(session, batch, runner):
    def change():
        session._cache.rewind(0, 1, stream=runner.stream)
        plan = StepPlan.of([[], [7], [8, 9]])
        batch.prefilled(runner.slots, plan, runner.chunks([1, 2, 1], plan))

    before = states(runner)
    fail_after(runner, change)
    assert states(runner) == before


def test_work_that_fails_leaves_which_slots_are_active():
    with make() as session:
        batch, runner = session._batch, session._runner
        session.prefill([[1, 2], [3]])
        before = states(runner)
        added = []

        def change():
            added.extend(batch.added(runner.slots, [[4]], adapters=[None], skip_prompt_cache=[False]))
            assert session.cache.active_batch_size == 3

        fail_after(runner, change)
        assert len(added) == 3
        assert states(runner) == before


def test_a_plan_says_for_each_slot_which_logits_are_wanted():
    """A draft, a slot without one, a part of a prompt and an idle slot share an enqueue."""
    with with_every_logit(slots=4) as session:
        runner, received = session._runner, []
        session.prefill([[1, 2, 3], [4, 5], [6], [7]])
        wanted = [LogitsWanted.ALL, LogitsWanted.LAST, LogitsWanted.NONE, LogitsWanted.NONE]
        plan = StepPlan.of([[8, 9, 10], [11], [12, 13], []])._replace(logits=wanted)
        with runner.work():
            slots, logits = session._batch.prefilled(
                runner.slots, plan, runner.chunks([3, 2, 1, 1], plan), receive=lambda slot, rows: received.append((slot, rows.copy()))
            )
            runner.apply(slots)
        assert [slot.tokens for slot in runner.slots] == [[1, 2, 3, 8, 9, 10], [4, 5, 11], [6, 12, 13], [7]]
        assert [slot for slot, _ in received] == [0]
        np.testing.assert_array_equal(received[0][1], [logits_after([1, 2, 3, *[8, 9, 10][: count + 1]]) for count in range(3)])
        assert [*logits] == [0, 1]
        np.testing.assert_array_equal([*logits.values()], [logits_after([1, 2, 3, 8, 9, 10]), logits_after([4, 5, 11])])
        assert len(session.engine.steps) == 2


def test_recovery_runs_nothing_again(batch, runner):
    steps = len(runner.engine.steps)
    plan = StepPlan.of([[8, 9], [10], []])
    fail_after(runner, lambda: batch.prefilled(runner.slots, plan, runner.chunks([3, 2, 1], plan)))
    assert (batch.held, len(runner.engine.steps)) == ([3, 2, 1], steps + 1)


def test_slots_that_were_applied_stay_if_later_work_fails(batch, runner):
    fail_after(runner, lambda: batch.rewind(0, 1))
    assert runner.slots[0].tokens == [1]
    assert states(runner)[1] == (1, 2, 1)


def test_compaction_moves_what_the_slots_hold(batch, runner):
    batch.compact([-1, 0, 1])
    assert [fields_of(slot) for slot in runner.slots] == [([4, 5], (20,), 0, (7, 1)), ([6], (), 0, None)]


def test_clear_leaves_no_slot_active(batch, runner):
    batch.clear()
    assert (len(batch), runner.checked_lengths()) == (0, ())


def test_a_new_slot_is_empty():
    assert fields_of(Slot([], 0)) == ([], (), 0, None)


def test_lengths_that_somebody_else_has_changed_are_noticed_before_anything_runs(session, batch, runner):
    steps = len(runner.engine.steps)
    session.cache.rewind(0, 1, stream=runner.stream)
    for call in (runner.checked_lengths, lambda: batch.decode([1, 2, 3]), lambda: batch.append([[1]] * 3), lambda: batch.rewind(1, 1)):
        with raises(RangeError, "cache lengths", expected="(3, 2, 1)", got="(1, 2, 1)"):
            call()
    assert len(runner.engine.steps) == steps


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda batch: batch.check_prompts([]), ShapeError, "prompts: expected 1 to max_batch_size=3 of them, got 0."),
        (lambda batch: batch.check_prompts([[1], []]), ShapeError, "prompts[1]: expected at least one token, got none."),
        (lambda batch: batch.check_prompts([[1]], reuse=True), ShapeError, "prompts: expected one for each of 3 active slots, got 1."),
        (
            lambda batch: batch.check_prompts([[1] * 17]),
            CapacityError,
            "prompt 0 has 17 tokens; that exceeds max_sequence_length=16. Nothing was changed.",
        ),
        (
            lambda batch: batch.check_turns([[1], [1] * 14, [1]]),
            CapacityError,
            "slot 1 holds 2 tokens; adding 15 exceeds max_sequence_length=16. Nothing was changed.",
        ),
        (lambda batch: batch.append([[1]]), ShapeError, "turns: expected one for each of 3 active slots, got 1."),
        (lambda batch: batch.decode([1]), ShapeError, "tokens: expected one for each of 3 active slots, got 1."),
    ],
)
def test_what_is_refused(batch, runner, call, kind, text):
    before = states(runner)
    with pytest.raises(kind) as error:
        call(batch)
    assert str(error.value) == text
    assert states(runner) == before


def test_a_decode_step_reads_the_lengths_once(batch, session, monkeypatch):
    cache = type(session.cache)
    read = cache.host_kv_cache_lengths.fget
    reads = []
    monkeypatch.setattr(cache, "host_kv_cache_lengths", property(lambda self: reads.append(1) or read(self)))
    batch.decode([1, 2, 3])
    assert len(reads) == 1


def test_a_full_slot_takes_no_part_in_a_decode_step(batch, runner):
    batch.append([[1] * 13, [], []])
    before = states(runner)
    with pytest.raises(CapacityError, match=r"^slot 0 holds 16 tokens; adding 1 exceeds max_sequence_length=16\."):
        batch.decode([1, 2, 3])
    with pytest.raises(CapacityError, match=r"^slot 0 holds 16 tokens"):
        batch.check_decode(StepPlan.of([[1], [], [3]]))
    assert states(runner) == before
    batch.check_decode(StepPlan.of([[], [2], [3]]))
    assert [(slot.length, len(slot.pending)) for slot in runner.slots] == [(15, 1), (2, 1), (1, 0)]
