"""The logits of several new tokens per slot: those of step-by-step decoding, for each variant of attention."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, raises
from tests.sweeps import each_once, one_of_each_family
from trt_kvcache.errors import BindingError, ConfigError, EngineError

from .rig import DECODE, MODELS, PREFILL, Rig, golden, random_ids
from .test_golden import TOLERANCE

VERIFY = 2
VARIANTS = ["native", "mask", "plugin"]
ATTENTION = pytest.mark.parametrize("attention", VARIANTS)


def step_by_step(model: str, ids: np.ndarray, attention: str) -> np.ndarray:
    """Return the logits ``[B, n, vocab]`` of every token, each from a decode step of its own."""
    rig = Rig(model, attention=attention)
    steps = [rig.step(column[:, None], [length] * len(ids), profile=DECODE).copy() for length, column in enumerate(ids.T)]
    return np.stack(steps, axis=1)


@pytest.mark.parametrize(("model", "attention"), each_once(one_of_each_family(MODELS), VARIANTS))
def test_one_prefill_gives_the_logits_of_every_step(model: str, attention: str) -> None:
    rig = Rig(model, attention=attention, logits=24)
    ids = random_ids(rig.model.vocab_size, 3, 24)
    found = rig.step(ids, [0, 0, 0], [range(24)] * 3)
    assert_close(found, step_by_step(model, ids, attention))


@pytest.mark.parametrize(("model", "attention"), each_once(one_of_each_family(MODELS), VARIANTS))
def test_they_are_those_of_hugging_face(model: str, attention: str) -> None:
    ids, expected = golden(model)
    found = Rig(model, attention=attention, logits=24).step(ids, [0], [range(24)])[0]
    assert_close([found[length - 1] for length in expected], [*expected.values()], TOLERANCE)


@ATTENTION
def test_slots_that_begin_at_different_lengths(attention: str) -> None:
    rig = Rig("qwen2-tied", attention=attention, logits=24)
    ids = random_ids(rig.model.vocab_size, 3, 24)
    expected = step_by_step("qwen2-tied", ids, attention)
    starts = [0, 4, 11]
    rig.step(ids[:, :11], [0, 0, 0], [0, 0, 0])
    new = np.stack([row[start : start + 9] for row, start in zip(ids, starts, strict=True)])
    found = rig.step(new, starts, [range(9)] * 3, profile=VERIFY)
    assert_close(found, np.stack([row[start : start + 9] for row, start in zip(expected, starts, strict=True)]))


def test_any_tokens_in_any_order() -> None:
    rig = Rig("qwen3-sharded", logits=5)
    ids = random_ids(rig.model.vocab_size, 3, 24)
    expected = step_by_step("qwen3-sharded", ids, "native")
    chosen = np.array([[23, 0, 7, 7, 1], [2, 3, 4, 5, 6], [0, 0, 0, 0, 22]])
    found = rig.step(ids, [0, 0, 0], chosen)
    assert_close(found, np.take_along_axis(expected, chosen[:, :, None], axis=1))


def test_the_same_engine_gives_one_per_slot() -> None:
    many, one = Rig("llama", logits=24), Rig("llama")
    ids = random_ids(one.model.vocab_size, 3, 24)
    for profile in (PREFILL, DECODE, VERIFY):
        new, last = (ids[:, :1], [0, 0, 0]) if profile == DECODE else (ids[:, :9], [8, 3, 0])
        expected = one.step(new, [0, 0, 0], last, profile=min(profile, DECODE) if profile != VERIFY else PREFILL)
        np.testing.assert_array_equal(many.step(new, [0, 0, 0], last, profile=profile), expected)


def test_profiles_limit_what_can_be_chosen() -> None:
    rig = Rig("llama", logits=5)
    assert [(one.name, one.max_width, one.max_logits) for one in rig.engine.profiles] == [
        ("prefill", 24, 5),
        ("decode", 1, 1),
        ("verify", 5, 5),
    ]
    ids = random_ids(rig.model.vocab_size, 1, 8)
    with raises(BindingError, "`last_token_ids`", expected="[1..3, 1..5] (profile 'prefill')", got="[1, 6]"):
        rig.step(ids, [0], [range(6)])
    with raises(BindingError, "`input_ids`", expected="[1..3, 1..5] (profile 'verify')", got="[1, 8]"):
        rig.step(ids, [0], [range(5)], profile=VERIFY)


def test_a_token_beyond_the_new_ones_is_refused_before_anything_is_written() -> None:
    rig = Rig("llama", logits=5)
    rig.poison(7)
    with raises(EngineError, "`last_token_ids`", expected="values from 0 to 2", got="3 at [1, 1]"):
        rig.step(random_ids(67, 2, 3), [0, 0], [[0, 2], [1, 3]])
    assert all((array == 7).all() for array in rig.caches())


def test_as_many_as_new_tokens_at_most() -> None:
    with raises(ConfigError, "max_logits_per_slot", expected="at most max_prefill_length=24", got=25):
        Rig("llama", logits=25)
