"""Sampling against the plain definition, and what makes a request's randomness its own."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from tests.kernels.plain_choice import plain_distribution
from trt_kvcache.errors import EngineError, RangeError
from trt_kvcache.generation.sampling import Sampler, SamplingParams


def naive_distribution(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
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


def frequencies(logits: np.ndarray, params: SamplingParams, draws: int) -> np.ndarray:
    sampler = Sampler(params)
    return np.bincount([sampler.choose(logits, counter) for counter in range(draws)], minlength=len(logits)) / draws


def assert_distribution(params: SamplingParams, logits: np.ndarray) -> None:
    """The oracle of the fast choice is the definition too."""
    options = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    tokens, weights = plain_distribution(logits, **options)
    found = {token: weight / sum(weights) for token, weight in zip(tokens, weights, strict=True)}
    assert found == pytest.approx(naive_distribution(logits, params), rel=2e-5)


LOGITS = np.array([1.0, 3.0, 2.5, -1.0, 3.0, 0.0, 2.0, -8.0], np.float32)


class TestChoice:
    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 1.0},
            {"temperature": 0.4},
            {"temperature": 3.0},
            {"temperature": 1.0, "top_k": 3},
            {"temperature": 1.0, "top_k": 1},
            {"temperature": 1.0, "top_k": 8},
            {"temperature": 1.0, "top_k": 100},
            {"temperature": 1.0, "top_p": 0.75},
            {"temperature": 2.0, "top_p": 0.4},
            {"temperature": 1.0, "top_p": 1e-9},
            {"temperature": 1.0, "min_p": 0.3},
            {"temperature": 2.0, "min_p": 0.9},
            {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
        ],
    )
    def test_frequencies_are_those_of_the_definition(self, options):
        params = SamplingParams(seed=5, **options)
        draws = 4000
        expected = naive_distribution(LOGITS, params)
        found = frequencies(LOGITS, params, draws)
        assert set(np.flatnonzero(found)) <= set(expected)
        for token, probability in expected.items():
            assert abs(found[token] - probability) < 5 * math.sqrt(probability * (1 - probability) / draws) + 1e-12

    @given(
        logits=st.lists(st.integers(-4, 4), min_size=1, max_size=9),
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        top_k=st.integers(0, 10),
        top_p=st.sampled_from([0.05, 0.31, 0.77, 1.0]),
        min_p=st.sampled_from([0.0, 0.07, 0.6]),
    )
    def test_only_the_tokens_of_the_definition_are_left(self, logits, temperature, top_k, top_p, min_p):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
        array = np.array(logits, np.float32)
        assert_distribution(params, array)

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({"top_k": 2}, {0, 2}),
            ({"top_p": 0.49}, {0, 2}),
            ({"top_p": 0.24}, {0}),
            ({"top_k": 3, "top_p": 0.5}, {0, 2}),
            ({"min_p": 0.5}, {0, 2, 3, 4}),
        ],
    )
    def test_of_equally_likely_tokens_at_a_border_the_lowest_ids_are_kept(self, options, kept):
        logits = np.array([9, 0, 9, 9, 9, 0], np.float32)
        assert set(np.flatnonzero(frequencies(logits, SamplingParams(temperature=1.0, seed=3, **options), 100))) == kept

    def test_greedy_takes_the_lowest_of_the_most_likely(self):
        assert Sampler(SamplingParams()).choose(LOGITS, 0) == 1

    def test_greedy_does_not_need_a_seed(self):
        assert {Sampler(SamplingParams(seed=seed, top_k=3)).choose(LOGITS, 0) for seed in range(9)} == {1}

    def test_top_k_1_is_greedy_at_any_temperature(self):
        assert {Sampler(SamplingParams(temperature=9.0, top_k=1, seed=seed)).choose(LOGITS, 0) for seed in range(9)} == {1}

    @pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
    def test_the_smallest_temperature_chooses_the_most_likely_token(self, temperature):
        found = frequencies(LOGITS, SamplingParams(temperature=temperature, seed=1), 200)
        assert found[1] + found[4] == 1
        assert 0.3 < found[1] < 0.7

    def test_a_token_of_probability_zero_is_never_chosen(self):
        logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
        found = frequencies(logits, SamplingParams(temperature=100.0, seed=1), 200)
        assert set(np.flatnonzero(found)) == {1, 3}

    def test_logits_are_not_changed(self):
        logits = LOGITS.copy()
        Sampler(SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)).choose(logits, 0)
        np.testing.assert_array_equal(logits, LOGITS)

    def test_large_logits_do_not_overflow(self):
        logits = np.array([3e38, 3e38, -3e38], np.float32)
        assert set(np.flatnonzero(frequencies(logits, SamplingParams(temperature=0.01, seed=1), 50))) == {0, 1}

    @pytest.mark.parametrize(("bad", "token"), [(np.nan, 5), (np.inf, 5)])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_that_are_not_finite_are_refused(self, bad, token, temperature):
        logits = LOGITS.copy()
        logits[token] = bad
        sampler = Sampler(SamplingParams(temperature=temperature, seed=3))
        with raises(EngineError, "logits", expected="finite numbers", got=f"{bad} for token 5"):
            sampler.choose(logits, 0)
        assert sampler.choose(LOGITS, 0) == Sampler(SamplingParams(temperature=temperature, seed=3)).choose(LOGITS, 0)

    def test_at_least_one_token_is_always_left(self):
        with raises(EngineError, "logits", expected="finite numbers", got="-inf for token 0"):
            Sampler(SamplingParams()).choose(np.full(4, -np.inf, np.float32), 0)


class TestSeed:
    def test_the_same_seed_gives_the_same_tokens(self):
        def chosen(seed):
            sampler = Sampler(SamplingParams(temperature=2.0, seed=seed))
            return [sampler.choose(LOGITS, counter) for counter in range(40)]

        assert chosen(7) == chosen(7) != chosen(8)

    def test_without_a_seed_each_sampler_draws_its_own(self):
        params = SamplingParams(temperature=2.0)
        samplers = [Sampler(params) for _ in range(4)]
        assert len({sampler.seed for sampler in samplers}) == 4
        assert len({tuple(sampler.choose(LOGITS, counter) for counter in range(40)) for sampler in samplers}) == 4

    def test_a_drawn_seed_gives_the_same_tokens_again(self):
        sampler = Sampler(SamplingParams(temperature=2.0))
        again = Sampler(SamplingParams(temperature=2.0, seed=sampler.seed))
        assert [sampler.choose(LOGITS, counter) for counter in range(40)] == [again.choose(LOGITS, counter) for counter in range(40)]

    def test_a_choice_depends_on_seed_and_counter_alone(self):
        sampler = Sampler(SamplingParams(temperature=2.0, seed=7))
        expected = [sampler.choose(LOGITS, counter) for counter in range(12)]
        for counter in (3, 3, 4, 0, 11, 11, 10, 5, 6, 7):
            assert sampler.choose(LOGITS, counter) == expected[counter]

    def test_each_token_consumes_one_random_number(self):
        # Two requests of one seed whose logits differed for a while choose the same from then on.
        one, other = (Sampler(SamplingParams(temperature=1.0, seed=4)) for _ in range(2))
        for counter in range(5):
            one.choose(LOGITS, counter)
            other.choose(-LOGITS, counter)
        assert [one.choose(LOGITS, counter) for counter in range(5, 25)] == [other.choose(LOGITS, counter) for counter in range(5, 25)]


class TestParams:
    def test_defaults_are_greedy(self):
        params = SamplingParams()
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
        assert (params.max_new_tokens, params.seed, params.stop, params.stop_token_ids) == (128, None, (), ())

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0."),
            ({"max_new_tokens": 2.5}, "max_new_tokens: expected an integer, got 2.5."),
            ({"max_new_tokens": True}, "max_new_tokens: expected an integer, got True."),
            ({"temperature": -0.1}, "temperature: expected a finite number, at least 0, got -0.1."),
            ({"temperature": math.inf}, "temperature: expected a finite number, at least 0, got inf."),
            ({"temperature": math.nan}, "temperature: expected a finite number, at least 0, got nan."),
            ({"temperature": "hot"}, "temperature: expected a finite number, at least 0, got 'hot'."),
            ({"temperature": None}, "temperature: expected a finite number, at least 0, got None."),
            ({"top_k": -1}, "top_k: expected at least 0, got -1."),
            ({"top_p": 0}, "top_p: expected 0 < top_p <= 1, got 0."),
            ({"top_p": 1.01}, "top_p: expected 0 < top_p <= 1, got 1.01."),
            ({"top_p": math.nan}, "top_p: expected 0 < top_p <= 1, got nan."),
            ({"min_p": -0.2}, "min_p: expected 0 <= min_p < 1, got -0.2."),
            ({"min_p": 1}, "min_p: expected 0 <= min_p < 1, got 1."),
            ({"seed": -1}, f"seed: expected an integer from 0 to {2**63 - 1}, got -1."),
            ({"seed": 2**63}, f"seed: expected an integer from 0 to {2**63 - 1}, got {2**63}."),
            ({"stop_token_ids": (3, -1)}, "stop_token_ids: expected at least 0, got -1."),
            ({"stop_token_ids": 3}, "stop_token_ids: expected a sequence of token ids, got 3."),
            ({"stop": ""}, "stop: expected texts that are not empty, got ''."),
            ({"stop": ["a", ""]}, "stop: expected texts that are not empty, got ''."),
            ({"stop": [3]}, "stop: expected texts that are not empty, got 3."),
            ({"stop": 3}, "stop: expected texts that are not empty, got 3."),
        ],
    )
    def test_parameters_out_of_range_are_refused(self, options, text):
        with pytest.raises(RangeError) as error:
            SamplingParams(**options)
        assert str(error.value) == f"SamplingParams.{text}"

    def test_one_stop_text_need_not_be_in_a_list(self):
        assert SamplingParams(stop="END").stop == ("END",)
        assert SamplingParams(stop=["a", "b"], stop_token_ids=[np.int64(3)]).stop == ("a", "b")

    def test_numpy_scalars_become_python_numbers(self):
        params = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(3), seed=np.int64(9), stop_token_ids=np.array([4, 5]))
        assert (params.top_k, params.stop_token_ids) == (3, (4, 5))
        assert Sampler(params).seed == 9

    def test_parameters_are_immutable(self):
        with pytest.raises(FrozenInstanceError):
            SamplingParams().temperature = 1.0
