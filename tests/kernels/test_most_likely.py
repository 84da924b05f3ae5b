"""The most likely tokens, against sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trt_kvcache.kernels import most_likely as module
from trt_kvcache.kernels.most_likely import most_likely


def sorted_choice(logits, count):
    return np.sort(np.argsort(-logits, kind="stable")[:count])


@given(values=st.lists(st.integers(-4, 4), min_size=1, max_size=60), count=st.integers(0, 60), groups=st.sampled_from([2, 3, 16]))
def test_ties_go_to_the_lowest_ids(values, count, groups):
    logits = np.array(values, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MIN_GROUPS", groups)
        patch.setattr(module, "_GROUPS_PER_TOKEN", 1)
        assert most_likely(logits, count).tolist() == sorted_choice(logits, count).tolist()


@pytest.mark.parametrize("count", [1, 7, 50, 1000, 20000, 40000])
@pytest.mark.parametrize("kind", ["normal", "flat", "ascending", "coarse", "excluded"])
def test_a_large_vocabulary(kind, count):
    rng = np.random.default_rng(count)
    logits = rng.normal(size=40003).astype(np.float32)
    if kind == "flat":
        logits[:] = 0.25
    elif kind == "ascending":
        logits.sort()
    elif kind == "coarse":
        logits = np.round(logits * 4) / 4
    elif kind == "excluded":
        logits[rng.random(logits.size) < 0.7] = -np.inf
    assert most_likely(logits, count).tolist() == sorted_choice(logits, count).tolist()


def test_logits_that_float64_cannot_tell_apart_from_the_largest_one_are_no_ties():
    logits = np.full(4096, -1, np.float32)
    logits[[5, 2000, 3000, 4000]] = [1.0, 1e-20, 2e-20, 3e-20]
    assert most_likely(logits, 2).tolist() == [5, 4000] == sorted_choice(logits, 2).tolist()


@pytest.mark.parametrize("count", [5, 50, 1000])
def test_of_many_that_are_equally_likely_none_is_ordered(count, monkeypatch):
    logits = np.full(40003, -1.5, np.float32)
    logits[::5000] = 2.0
    partition, sizes = np.partition, []
    monkeypatch.setattr(np, "partition", lambda values, place: (sizes.append(values.size), partition(values, place))[1])
    assert most_likely(logits, count).tolist() == sorted_choice(logits, count).tolist()
    assert max(sizes) <= 4 * max(count, 256)
