"""The weights of tokens: integers that fall with the class, close to the exponential function."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels.plain_choice import plain_weight
from trt_kvcache.kernels.philox import random_bits
from trt_kvcache.kernels.token_weights import NUM_CLASSES, class_weights, min_weight, scale_of, token_weights, top_p_bits


@pytest.fixture(scope="module")
def weights():
    classes = np.arange(NUM_CLASSES + 2, dtype=np.int32)
    return class_weights(classes, out=np.empty(classes.size, np.float32))


def test_they_never_rise(weights):
    assert (np.diff(weights) <= 0).all()
    assert (np.diff(weights[: 9 << 16]) < 0).all()  # so long as they have 24 bits
    assert (weights[0], weights[NUM_CLASSES - 1], weights[-1]) == (2**33, 0, 0)


def test_they_are_integers_close_to_the_exponential_function(weights):
    exact = np.exp2(33 - np.arange(weights.size) / 2**16)
    np.testing.assert_array_equal(weights, np.floor(weights))
    assert (np.abs(weights - exact) <= 3e-7 * exact + 1).all()


@pytest.mark.parametrize("one", [0, 1, 65535, 65536, 10**6, 33 * 2**16, 33 * 2**16 + 1, NUM_CLASSES - 1])
def test_the_definition(weights, one):
    assert weights[one] == plain_weight(one)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 0.7, 1.0, 1e30, 1.7e308])
def test_any_temperature_has_a_scale(temperature):
    scale = scale_of(temperature)
    assert np.finfo(np.float32).tiny <= scale <= np.finfo(np.float32).max
    logits = np.array([1.0, -np.inf, 1.0, -3e38], np.float32)
    with np.errstate(over="ignore"):
        found = token_weights(logits, logits.max(), scale, out=np.empty(4, np.float32))
    assert found[[0, 1, 2]].tolist() == [2**33, 0, 2**33]


def test_thresholds_are_rounded_up():
    assert top_p_bits(1.0) == 0
    assert top_p_bits(5e-324) == 1
    assert top_p_bits(0.5) == 2**52
    assert top_p_bits(math.nextafter(1, 0)) == 2**53 - 1
    assert [min_weight(p) for p in (0.0, 5e-324, 0.5, 0.1)] == [0, 1, 2**32, math.ceil(0.1 * 2**33)]


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
@pytest.mark.parametrize("counter", [0, 1, 3, 4, 5, 1022, 2**40 + 3])
def test_a_random_number_by_its_index(seed, counter):
    generator = np.random.Generator(np.random.Philox(key=seed).advance(counter // 4))
    assert random_bits(seed, counter) / 2**53 == generator.random(4)[counter % 4]
