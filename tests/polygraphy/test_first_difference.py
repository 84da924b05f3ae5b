from __future__ import annotations

import numpy as np
import pytest

from trt_kvcache.polygraphy.first_difference import Output, compare_arrays, first_difference, outputs_in_order

SHAPE = (3, 2, 7, 5)  # A, H, n, D


def _rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def test_a_fault_is_looked_for_in_the_order_of_computation() -> None:
    of_layers = ["conv_state_0", "k_cache_0", "v_cache_0", "conv_state_1", "recurrent_state_1", "k_cache_10", "v_cache_10"]
    outputs = list(outputs_in_order(["logits", *of_layers, "kvcache_lengths", "another_0", "k_cache_x"]))
    assert [output.name for output in outputs] == ["kvcache_lengths", *of_layers, "logits"]
    assert [output.layer for output in outputs] == [None, 0, 0, 0, 1, 1, 10, 10, None]
    assert [output.kind for output in outputs[1:6]] == ["conv state", "K", "V", "conv state", "recurrent state"]
    assert list(outputs_in_order({"logits"})) == [Output("logits", None, "logits")]


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (2, 1, 6, 4), (1, 0, 5, 3)])
def test_the_first_wrong_element_of_cache_rows_is_named(place: tuple[int, ...]) -> None:
    ours, theirs = _rows(), _rows()
    theirs[place] += 0.5
    theirs[2, 1, 6, 4] -= 0.25
    outcome = compare_arrays(ours, theirs, 1e-3)
    found = first_difference(4, Output("v_cache_1", 1, "V"), ours, theirs, outcome)
    assert found is not None
    assert (found.step, found.tensor, found.layer, found.kind) == (4, "v_cache_1", 1, "V")
    assert (found.slot, found.head, found.position, found.element) == place
    assert found.values == (ours[place], theirs[place])
    assert found.count == len({place, (2, 1, 6, 4)})
    assert found.allowed == pytest.approx(1e-3 * abs(ours[place[0], place[1]]).max())


def test_the_first_wrong_logit_and_length_are_named() -> None:
    ours = np.random.default_rng(0).standard_normal((3, 11)).astype(np.float32)
    theirs = ours.copy()
    theirs[1, 9] += 1
    found = first_difference(0, Output("logits", None, "logits"), ours, theirs, compare_arrays(ours, theirs, 1e-2))
    assert found is not None
    assert (found.slot, found.head, found.position, found.element, found.count) == (1, None, None, 9, 1)
    lengths = np.array([4, 500, 6], np.int32), np.array([4, 499, 6], np.int32)
    found = first_difference(0, Output("kvcache_lengths", None, "length"), *lengths, compare_arrays(*lengths, 0.0))
    assert found is not None
    assert (found.slot, found.element, found.values) == (1, None, (500, 499))


def test_the_first_wrong_element_of_a_state_is_named() -> None:
    recurrent, conv = _rows(), _rows()[:, 0]
    for name, kind, ours in (("recurrent_state_4", "recurrent state", recurrent), ("conv_state_4", "conv state", conv)):
        theirs = ours.copy()
        place = (1, 0, 6, 2)[-ours.ndim :] if ours.ndim == 4 else (1, 6, 2)
        theirs[place] += 0.5
        found = first_difference(2, Output(name, 4, kind), ours, theirs, compare_arrays(ours, theirs, 1e-3))
        assert found is not None
        assert (found.layer, found.slot, found.head, found.channel, found.position) == (4, 1, 0 if ours.ndim == 4 else None, 6, None)
        assert (found.element, found.count) == (2, 1)
        assert found.allowed == pytest.approx(1e-3 * abs(ours[place[:-2]]).max())


def test_equal_arrays_have_no_difference() -> None:
    outcome = compare_arrays(_rows(), _rows(), 0.0)
    assert (outcome.share, outcome.wrong.any()) == (0.0, False)
    assert first_difference(0, Output("k_cache_0", 0, "K"), _rows(), _rows(), outcome) is None


def test_the_measure_is_the_largest_value_of_the_slot_and_head() -> None:
    ours = np.ones(SHAPE, np.float32)
    ours[1, 0] *= 100
    ours[1, 0, 3, 2] = 0.01  # small beside its neighbours: carries their rounding errors
    theirs = ours.copy()
    theirs[1, 0, 3, 2] += 0.9
    assert not compare_arrays(ours, theirs, 1e-2).wrong.any()
    assert compare_arrays(ours, theirs, 1e-2).share == pytest.approx(0.009)
    theirs[1, 1, 3, 2] += 0.02  # another head: its largest value is 1
    assert np.argwhere(compare_arrays(ours, theirs, 1e-2).wrong).tolist() == [[1, 1, 3, 2]]
    theirs[0, 0, 3, 2] += 0.02  # another slot
    assert np.argwhere(compare_arrays(ours, theirs, 1e-2).wrong).tolist() == [[0, 0, 3, 2], [1, 1, 3, 2]]


def test_nan_differs_even_from_itself_and_equal_infinities_do_not() -> None:
    ours = _rows()
    ours[0, 1, 2, 3] = np.inf
    assert not compare_arrays(ours, ours, 0.0).wrong.any()
    theirs = ours.copy()
    theirs[0, 1, 2, 3] = -np.inf
    assert compare_arrays(ours, theirs, 1.0).wrong[0, 1, 2, 3]
    theirs[0, 1, 2, 3] = 5.0
    assert compare_arrays(ours, theirs, 1.0).wrong[0, 1, 2, 3]
    ours[0, 1, 2, 3] = theirs[0, 1, 2, 3] = np.nan
    outcome = compare_arrays(ours, theirs, 1.0)
    assert np.argwhere(outcome.wrong).tolist() == [[0, 1, 2, 3]]
    assert np.isnan(outcome.share)


def test_rows_of_zeros_must_be_equal() -> None:
    ours, theirs = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    assert not compare_arrays(ours, theirs, 1e-2).wrong.any()
    theirs[2, 0, 1, 4] = 1e-9
    outcome = compare_arrays(ours, theirs, 1e-2)
    assert np.argwhere(outcome.wrong).tolist() == [[2, 0, 1, 4]]
    assert outcome.share == np.inf
