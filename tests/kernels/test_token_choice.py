"""The fast choice of a token against the definition: the same token for every random number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.kernels.plain_choice import place_in, plain_choice, plain_distribution
from trt_kvcache.kernels import ordered_tokens, token_choice
from trt_kvcache.kernels.token_choice import choice_params
from trt_kvcache.kernels.token_weights import class_weights, token_classes, token_weights

#: Sizes with which a vocabulary of a few dozen tokens is a large one.
SMALL = [(token_choice, "FEW", 2), (token_choice, "_BLOCK", 3), (token_choice, "_SAMPLE", 9), (token_choice, "_LIKELIEST", 1)]
SMALL += [(ordered_tokens, "FEW", 2), (ordered_tokens, "_BIN_BITS", 2)]


def choose_token(logits, *, uniform, **options):
    return token_choice.choose_token(logits, logits.max(), int(uniform * 2**53), choice_params(**options))


@pytest.fixture
def small(monkeypatch):
    for small in SMALL:
        monkeypatch.setattr(*small)


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-30, 0.3, 1.0, 2.5, 60.0]),
        "top_k": st.sampled_from([0, 1, 3, 17, 100]),
        "top_p": st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-9, 0.07, 0.6]),
    }
)


@pytest.mark.parametrize("kind", ["ties", "floats", "excluded", "restricted"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), options=OPTIONS, uniform=st.floats(0, 1, exclude_max=True))
def test_every_way_chooses_the_token_of_the_definition(kind, data, options, uniform):
    values = {
        "ties": st.integers(-4, 4),
        "floats": st.floats(-30, 30, width=32),
        "excluded": st.sampled_from([-np.inf, -1e30, -2.0, 0.0, 0.5, 3.0]),
        "restricted": st.sampled_from([-np.inf] * 9 + [-1e30, -23.5, -2.0, 0.5]),
    }[kind]
    logits = np.array([0.0, *data.draw(st.lists(values, max_size=40))], np.float32)
    with pytest.MonkeyPatch.context() as patch:
        for small in SMALL:
            patch.setattr(*small)
        assert choose_token(logits, uniform=uniform, **options) == plain_choice(logits, uniform=uniform, **options)


def vocabulary(kind: str, size: int = 6000) -> np.ndarray:
    rng = np.random.default_rng(size)
    normal = rng.normal(size=size)
    logits = {
        "normal": normal * 2,
        "peaked": normal * 2.5 + np.where(rng.random(size) < 2e-4, rng.exponential(6, size) + 8, 0),
        "flat": normal * 0.01,
        "coarse": np.round(normal * 8) / 4,
        "equal": np.zeros(size),
        "excluded": np.where(rng.random(size) < 0.5, -np.inf, normal),
        "restricted": np.where(rng.random(size) < 0.005, normal * 8, -np.inf),
        "outlier": np.where(np.arange(size) == 7, -1e30, normal),
        "one": np.where(np.arange(size) == 123, 400.0, normal),
    }
    return logits[kind].astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "coarse", "equal", "excluded", "restricted", "outlier", "one"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 1e-25},
        {"temperature": 1e25},
        {"temperature": 1.0, "top_k": 50},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 20_000},
        {"temperature": 1.5, "top_k": 20_000, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1e25, "top_p": 0.5},
        {"temperature": 1e-25, "top_p": 0.5},
        {"temperature": 60.0, "top_p": 0.999},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 60.0, "min_p": 1e-6},
        {"temperature": 1.5, "top_p": 0.95, "min_p": 0.2},
    ],
    ids=lambda options: "-".join(f"{name}{value}" for name, value in options.items()),
)
def test_a_large_vocabulary(kind, options):
    logits = vocabulary(kind)
    before = logits.copy()
    distribution = plain_distribution(logits, **options)
    for uniform in (0.0, *np.random.default_rng(1).random(3), 1 - 2.0**-53):
        assert choose_token(logits, uniform=uniform, **options) == place_in(*distribution, uniform)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.6}, {"min_p": 0.01}, {"top_k": 30, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.3}])
@pytest.mark.usefixtures("small")
def test_edges_between_tokens(options):
    """Random numbers at, just below and just above the edges of the sums."""
    logits = np.random.default_rng(5).normal(size=40).astype(np.float32)
    edges = np.linspace(0, 1, 17)[:-1]
    sums = np.cumsum(np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1])
    for edge in (*edges, *(sums / sums[-1])[:-1], 1 - 2.0**-53):
        for uniform in (np.nextafter(edge, 0), edge, min(np.nextafter(edge, 1), 1 - 2.0**-53)):
            given_options = {"temperature": 1.0, **options, "uniform": float(uniform)}
            assert choose_token(logits, **given_options) == plain_choice(logits, **given_options)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 1e-9}, {"top_p": 0.97, "min_p": 0.2}])
def test_both_sides_of_edges(options):
    """The largest random number that chooses a token, and the next one, which chooses the token after it."""
    logits = np.random.default_rng(6).normal(size=3000).astype(np.float32)
    tokens, weights = plain_distribution(logits, temperature=1.0, **options)
    total, ends = sum(weights), np.cumsum(weights).tolist()
    for place in range(0, len(tokens) - 1, 97):
        first = -(-ends[place] * 2**53 // total)
        for random, token in ((first - 1, tokens[place]), (first, tokens[place + 1])):
            assert choose_token(logits, uniform=random / 2**53, temperature=1.0, **options) == token


@pytest.mark.parametrize("kind", ["normal", "coarse"])
@pytest.mark.parametrize("min_p", [0.0, 0.001])
def test_a_nucleus_that_ends_at_the_edge_of_a_token(kind, min_p):
    """Where the estimate of the sum of all weights cannot tell which token is the last one, and so not which one is chosen."""
    logits = vocabulary(kind, 3000)
    _, weights = plain_distribution(logits, temperature=1.0, top_p=math.nextafter(1, 0))
    total, ends = sum(weights), np.cumsum(weights).tolist()
    for last in range(100, 2000, 311):
        edge = ends[last] / total
        for top_p in (math.nextafter(edge, 0), edge, math.nextafter(edge, 1)):
            options = {"temperature": 1.0, "top_p": top_p, "min_p": min_p}
            tokens, kept = plain_distribution(logits, **options)
            for place in (len(tokens) // 3, len(tokens) - 2):
                first = -(-sum(kept[: place + 1]) * 2**53 // sum(kept))
                for random, token in ((first - 1, tokens[place]), (first, tokens[place + 1])):
                    assert choose_token(logits, uniform=random / 2**53, **options) == token


def test_where_bounds_do_not_tell_the_sum_is_computed_and_only_likely_tokens_are_ordered(monkeypatch):
    in_order, token_weights = token_choice.in_order, token_choice.token_weights
    ordered, summed = [], []
    monkeypatch.setattr(token_choice, "in_order", lambda logits, *more: (ordered.append(logits.size), in_order(logits, *more))[1])
    monkeypatch.setattr(
        token_choice, "token_weights", lambda logits, *more, **out: (summed.append(1), token_weights(logits, *more, **out))[1]
    )
    logits = vocabulary("normal", 20_000)
    _, weights = plain_distribution(logits, temperature=1.0, top_p=math.nextafter(1, 0))
    for last in (500, 700, 901):
        top_p = sum(weights[: last + 1]) / sum(weights)
        tokens, kept = plain_distribution(logits, temperature=1.0, top_p=top_p)
        first = -(-sum(kept[: len(tokens) // 2 + 1]) * 2**53 // sum(kept))
        assert choose_token(logits, uniform=first / 2**53, temperature=1.0, top_p=top_p) == tokens[len(tokens) // 2 + 1]
    assert summed
    assert max(ordered) < logits.size / 4


@pytest.mark.parametrize("kind", ["normal", "peaked", "flat", "coarse", "excluded", "outlier", "one"])
@pytest.mark.parametrize("temperature", [1e-25, 0.05, 0.7, 30.0])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_bounds_of_the_weights_of_all_but_the_likely_tokens(kind, temperature, share):
    for size in (3000, 70_000):
        logits, params = vocabulary(kind, size), choice_params(temperature, top_p=0.9)
        likely, estimates = np.flatnonzero(logits >= np.quantile(logits, 1 - share)), np.empty(size, np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            token_choice._estimate(logits, logits.max(), params, out=estimates)
            low, high = token_choice._bounds_of_others(estimates, likely)
            weights = token_weights(logits, logits.max(), params.scale, out=np.empty(size, np.float32))
        others = int(weights.sum(dtype=np.float64) - weights[likely].sum(dtype=np.float64))
        assert low <= others <= high
        assert high - low <= 3e-5 * others + size + 1


def test_rows_of_many_kinds():
    """Thousands of them, against sums of integers over sorted classes."""
    rng = np.random.default_rng(8)
    for _ in range(2000):
        size, width = int(rng.integers(2049, 5000)), 10 ** rng.uniform(-3, 1)
        logits = (rng.normal(size=size) * width + (rng.random(size) < 0.002) * rng.exponential(10, size)).astype(np.float32)
        logits = np.round(logits * 64) / 64 if rng.random() < 0.5 else logits
        params, random = choice_params(10 ** rng.uniform(-1, 1), top_p=rng.uniform(0.01, 1)), int(rng.integers(2**53))
        classes = token_classes(logits, logits.max(), params.scale, out=np.empty(size, np.int32))
        order = np.argsort(classes, kind="stable")
        ends = np.cumsum(class_weights(classes[order], out=np.empty(size, np.float32)).astype(np.int64))
        kept = int(ends[np.searchsorted(ends, -(-params.top_p * int(ends[-1]) >> 53))])
        expected = order[np.searchsorted(ends, random * kept >> 53, side="right")]
        assert token_choice.choose_token(logits, logits.max(), random, params) == expected


def test_threads_do_not_share_what_they_compute_in():
    from concurrent.futures import ThreadPoolExecutor

    logits = [vocabulary(kind, 20_000) for kind in ("normal", "flat", "coarse", "peaked")] * 8
    options = {"temperature": 1.3, "top_p": 0.97, "uniform": 0.61}
    expected = [choose_token(one, **options) for one in logits]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda one: choose_token(one, **options), logits)) == expected


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {}, {"top_k": 40}, {"min_p": 0.05}])
def test_a_vocabulary_is_not_sorted(options, monkeypatch):
    sizes = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda array, **more: (sizes.append(array.size), argsort(array, **more))[1])
    for kind in ("normal", "peaked"):
        choose_token(vocabulary(kind, 50_000), uniform=0.4, temperature=1.0, **options)
    assert max(sizes, default=0) <= token_choice.FEW


@pytest.mark.parametrize("excluded", [-np.inf, -1e4])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 20_000}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.05}])
def test_tokens_that_are_excluded_are_not_ordered(options, excluded, monkeypatch):
    """With a grammar, they are nearly all."""
    sizes = []
    for name in ("most_likely", "in_order", "token_weights"):
        real = getattr(token_choice, name)
        monkeypatch.setattr(
            token_choice, name, lambda logits, *more, real=real, **out: (sizes.append(logits.size), real(logits, *more, **out))[1]
        )
    logits = np.full(50_000, excluded, np.float32)
    logits[np.arange(30) * 1234 + 17] = np.random.default_rng(3).normal(size=30)
    for uniform in (0.0, 0.4, 1 - 2.0**-53):
        assert choose_token(logits, uniform=uniform, temperature=1.0, **options) == plain_choice(
            logits, uniform=uniform, temperature=1.0, **options
        )
    assert 0 < max(sizes) <= 30
