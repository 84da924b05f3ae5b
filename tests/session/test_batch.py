"""``Batch``: what the slots hold and what the cache says change together or not at all."""

from __future__ import annotations

import pytest

from tests.helpers.sessions import make
from trt_kvcache.errors import CapacityError, EngineError, RangeError, ShapeError


@pytest.fixture
def batch():
    """Three slots: slot 1 has a pending token of a sampler."""
    with make() as session:
        session.prefill([[1, 2, 3], [4, 5], [6]])
        session._batch.record_token(1, 20, (7, 1))
        yield session._batch


def fields_of(slot):
    return list(slot.tokens), slot.pending, slot.reused, slot.sampler


def states(batch):
    """What the slots hold, and the lengths that the cache has for them."""
    return [fields_of(slot) for slot in batch], batch.checked_lengths()


def fail_after(batch, change):
    """Change a batch in a transaction that fails then."""

    def run():
        with batch.transaction():
            change()
            raise EngineError("no")

    with pytest.raises(EngineError, match=r"^no$"):
        run()


def test_a_slot_is_one_object(batch):
    assert fields_of(batch[1]) == ([4, 5], (20,), 0, (7, 1))
    assert (len(batch), batch.held, batch.reused) == (3, [3, 2, 1], [0, 0, 0])


def test_a_recorded_token_is_pending_and_changes_nothing_in_the_cache(batch):
    changes = batch.changes
    batch.record_token(0, 9, (5, 3))
    assert (batch[0].pending, batch[0].sampler) == ((9,), (5, 3))
    assert (batch.held, batch.changes) == ([3, 2, 1], changes)


def test_a_decode_step_takes_the_place_of_pending_tokens_of_the_slots_that_take_part(batch):
    batch.record_token(2, 21, None)
    batch.decode([8, 20, 0], [True, True, False])
    assert [(slot.tokens, slot.pending) for slot in batch] == [([1, 2, 3, 8], ()), ([4, 5, 20], ()), ([6], (21,))]
    assert batch[1].sampler == (7, 1)


def test_a_transaction_that_fails_restores_slots_and_lengths(batch):
    def change():
        batch.append([[8, 9], [10], []])
        batch.decode([1, 2, 3])
        batch.rewind(0, 1)
        batch.record_token(2, 11, (1, 1))
        batch.assign_sampler(0, (2, 2))

    before = states(batch)
    fail_after(batch, change)
    assert states(batch) == before


def test_a_transaction_that_fails_restores_which_slots_are_active():
    with make() as session:
        batch = session._batch
        session.prefill([[1, 2], [3]])
        before = states(batch)
        added = []

        def change():
            batch.add([[4]], [(7, 0)])
            added.append((len(batch), batch[2].sampler))

        fail_after(batch, change)
        assert added == [(3, (7, 0))]
        assert states(batch) == before


def test_a_rollback_runs_nothing_again(batch):
    engine = batch._steps.engine
    savepoint = batch.savepoint()
    batch.append([[8, 9], [10], []])
    steps = len(engine.steps)
    batch.rollback(savepoint)
    assert (batch.held, len(engine.steps)) == ([3, 2, 1], steps)


def test_tokens_at_a_savepoint_survive_a_rewind(batch):
    fail_after(batch, lambda: (batch.rewind(0, 1), batch.append([[9, 9], [], []])))
    assert batch[0].tokens == [1, 2, 3]


def test_compaction_moves_what_the_slots_hold(batch):
    batch.compact([-1, 0, 1])
    assert [fields_of(slot) for slot in batch] == [([4, 5], (20,), 0, (7, 1)), ([6], (), 0, None)]


def test_clear_leaves_no_slot_active(batch):
    batch.clear()
    assert (len(batch), batch.checked_lengths()) == (0, ())


def test_lengths_that_somebody_else_has_changed_are_noticed_before_anything_runs(batch):
    steps = len(batch._steps.engine.steps)
    batch._cache.rewind(0, 1, stream=batch._steps.stream)
    for call in (batch.checked_lengths, lambda: batch.decode([1, 2, 3]), lambda: batch.append([[1]] * 3), lambda: batch.rewind(1, 1)):
        with pytest.raises(
            RangeError, match=r"^cache lengths: expected \(3, 2, 1\), the tokens that this session has run, got \(1, 2, 1\)\."
        ):
            call()
    assert len(batch._steps.engine.steps) == steps


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
def test_what_is_refused(batch, call, kind, text):
    before = states(batch)
    with pytest.raises(kind) as error:
        call(batch)
    assert str(error.value) == text
    assert states(batch) == before


def test_a_decode_step_reads_the_lengths_once(batch, monkeypatch):
    cache = type(batch._cache)
    read = cache.host_kv_cache_lengths.fget
    reads = []
    monkeypatch.setattr(cache, "host_kv_cache_lengths", property(lambda self: reads.append(1) or read(self)))
    batch.decode([1, 2, 3])
    assert len(reads) == 1


def test_a_full_slot_takes_no_part_in_a_decode_step(batch):
    batch.append([[1] * 13, [], []])
    before = states(batch)
    with pytest.raises(CapacityError, match=r"^slot 0 holds 16 tokens; adding 1 exceeds max_sequence_length=16\."):
        batch.decode([1, 2, 3])
    with pytest.raises(CapacityError, match=r"^slot 0 holds 16 tokens"):
        batch.decode([1, 2, 3], [True, False, True])
    assert states(batch) == before
    batch.decode([1, 2, 3], [False, True, True])
    assert [len(slot.tokens) + len(slot.pending) for slot in batch] == [16, 3, 2]
