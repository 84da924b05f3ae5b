"""Sampling against the plain definition, and what makes a request's randomness its own."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.errors import EngineError, RangeError
from trt_kvcache.generation import sampling
from trt_kvcache.generation.sampling import Sampler, SamplingParams


def naive_distribution(logits, params):
    """The tokens that may be chosen and their probabilities, filter after filter, by the definitions."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        order = order[: params.top_k]
    weights = {token: math.exp((float(logits[token]) - float(logits[order[0]])) / params.temperature) for token in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for token in order:
        if mass / total < params.top_p or not kept:
            kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def chosen(count, logits, sampler=None, **options):
    sampler = sampler or Sampler(SamplingParams(**options))
    return [sampler.choose(logits) for _ in range(count)]


def assert_distribution(params, logits):
    tokens, weights = Sampler(params)._distribution(logits)
    found = dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))
    assert found == pytest.approx(naive_distribution(logits, params), rel=1e-12)


LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 3.0, 0.0, 2.0, -8.0], np.float32)


@pytest.mark.parametrize(
    "options",
    [*({"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.75}, {"min_p": 0.3}), {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1}],
)
def test_frequencies_are_those_of_the_definition(options):
    options = {"temperature": 1.0, "seed": 5, **options}
    expected, draws, logits = naive_distribution(LOGITS, SamplingParams(**options)), 4000, LOGITS.copy()
    found = np.bincount(chosen(draws, logits, **options), minlength=len(LOGITS)) / draws
    assert set(np.flatnonzero(found)) <= set(expected)
    for token, probability in expected.items():
        assert abs(found[token] - probability) < 5 * math.sqrt(probability * (1 - probability) / draws) + 1e-12
    np.testing.assert_array_equal(logits, LOGITS)  # not changed


@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=9),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
)
def test_only_the_tokens_of_the_definition_are_left(logits, **options):
    assert_distribution(SamplingParams(seed=1, **options), np.array(logits, np.float32))


@pytest.mark.parametrize("top_k", [0, 3, 6, 7])
@pytest.mark.parametrize("top_p", [0.01, 0.6, 0.9999])
def test_a_nucleus_that_is_larger_than_guessed(monkeypatch, top_k, top_p):
    monkeypatch.setattr(sampling, "_NUCLEUS_CANDIDATES", 2)
    assert_distribution(SamplingParams(temperature=1.7, top_k=top_k, top_p=top_p, seed=1), LOGITS)


def test_greedy_takes_the_lowest_of_the_most_likely_and_so_does_top_k_1():
    assert set(chosen(5, LOGITS, top_k=3) + chosen(5, LOGITS, temperature=9.0, top_k=1, seed=3)) == {1}


@pytest.mark.parametrize(
    ("temperature", "logits", "left"),
    [(5e-324, LOGITS, {1, 4}), (100.0, [-np.inf, 0, -np.inf, 0], {1, 3}), (0.01, [3e38, 3e38, -3e38], {0, 1})],
)
def test_extreme_numbers(temperature, logits, left):
    found = chosen(200, np.array(logits, np.float32), temperature=temperature, seed=1)
    assert set(found) == left
    assert 60 < found.count(min(left)) < 140


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(bad, temperature):
    logits = LOGITS.copy()
    logits[5] = bad
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3))
    with pytest.raises(EngineError) as error:
        sampler.choose(logits)
    assert str(error.value) == f"logits: expected finite numbers, got {bad} for token 5. The engine or its cache is damaged."
    assert sampler.counter == 0
    assert chosen(1, LOGITS, sampler) == chosen(1, LOGITS, temperature=temperature, seed=3)


def test_one_seed_gives_one_sequence_and_without_each_draws_its_own():
    assert chosen(40, LOGITS, temperature=2.0, seed=7) == chosen(40, LOGITS, temperature=2.0, seed=7)
    samplers = [Sampler(SamplingParams(temperature=2.0, seed=seed)) for seed in (7, 8, None, None)]
    found = [chosen(40, LOGITS, sampler) for sampler in samplers]
    assert len({tuple(one) for one in found}) == len({sampler.seed for sampler in samplers}) == 4
    assert chosen(40, LOGITS, temperature=2.0, seed=samplers[2].seed) == found[2]


@pytest.mark.parametrize(
    ("field", "expected", "values"),
    [
        ("max_new_tokens", "at least 1", [0]),
        ("max_new_tokens", "an integer", [2.5]),
        ("temperature", "a finite number, at least 0", [-0.1, math.nan, "hot"]),
        ("top_k", "at least 0", [-1]),
        ("top_p", "0 < top_p <= 1", [0, 1.01]),
        ("min_p", "0 <= min_p < 1", [-0.2, 1]),
        ("seed", f"an integer from 0 to {2**63 - 1}", [-1, 2**63]),
        ("stop_token_ids", "a sequence of token ids", [3]),
        ("stop", "texts that are not empty", ["", 3]),
    ],
)
def test_fields_out_of_range(field, expected, values):
    for value in values:
        with pytest.raises(RangeError) as error:
            SamplingParams(**{field: value})
        assert str(error.value) == f"SamplingParams.{field}: expected {expected}, got {value!r}."


def test_what_becomes_of_texts_and_numbers_of_numpy():
    assert (SamplingParams(stop="END").stop, SamplingParams(stop=["a", "b"]).stop) == (("END",), ("a", "b"))
    params = SamplingParams(top_k=np.int32(3), seed=np.int64(9), stop_token_ids=np.array([4, 5]))
    assert (params.top_k, params.stop_token_ids, Sampler(params).seed) == (3, (4, 5), 9)
