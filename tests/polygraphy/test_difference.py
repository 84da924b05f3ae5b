import numpy as np
import pytest

from trt_kvcache.polygraphy.difference import Output, compare_arrays, first_difference, outputs_in_order

SHAPE = (3, 2, 7, 5)  # A, H, n, D


def rows():
    return np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def wrong(*arrays, tolerance=1e-2):
    return np.argwhere(compare_arrays(*arrays, tolerance).wrong).tolist()


def test_a_fault_is_looked_for_in_the_order_of_computation():
    order = ["kvcache_lengths", "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1", "logits"]
    assert [output.name for output in outputs_in_order(set(order))] == order
    assert list(outputs_in_order({"logits"})) == [Output("logits", None, "logits")]


@pytest.mark.parametrize("place", [(0, 0, 0, 0), (2, 1, 6, 4), (1, 0, 5, 3)])
def test_the_first_wrong_element_of_cache_rows_is_named(place):
    ours, theirs = rows(), rows()
    theirs[place] += 0.5
    theirs[2, 1, 6, 4] -= 0.25
    found = first_difference(4, Output("v_cache_1", 1, "V"), ours, theirs, compare_arrays(ours, theirs, 1e-3))
    assert (found.step, found.tensor, found.layer, found.kind) == (4, "v_cache_1", 1, "V")
    assert (found.slot, found.head, found.position, found.element) == place
    assert found.values == (ours[place], theirs[place])
    assert found.count == len({place, (2, 1, 6, 4)})
    assert found.allowed == pytest.approx(1e-3 * abs(ours[place[0], place[1]]).max())


def test_the_measure_is_the_largest_value_of_the_slot_and_head():
    ours = np.ones(SHAPE, np.float32)
    ours[1, 0] *= 100
    ours[1, 0, 3, 2] = 0.01  # small beside its neighbours: carries their rounding errors
    theirs = ours.copy()
    theirs[1, 0, 3, 2] += 0.9
    assert wrong(ours, theirs) == []
    assert compare_arrays(ours, theirs, 1e-2).share == pytest.approx(0.009)
    theirs[1, 1, 3, 2] += 0.02  # another head: its largest value is 1
    theirs[0, 0, 3, 2] += 0.02  # another slot
    assert wrong(ours, theirs) == [[0, 0, 3, 2], [1, 1, 3, 2]]


def test_nan_differs_even_from_itself_and_equal_infinities_do_not():
    ours = rows()
    ours[0, 1, 2, 3] = np.inf
    assert wrong(ours, ours, tolerance=0.0) == []
    theirs = ours.copy()
    for value in (-np.inf, 5.0):
        theirs[0, 1, 2, 3] = value
        assert wrong(ours, theirs, tolerance=1.0) == [[0, 1, 2, 3]]
    ours[0, 1, 2, 3] = np.nan
    assert wrong(ours, ours, tolerance=1.0) == [[0, 1, 2, 3]]
    assert np.isnan(compare_arrays(ours, ours, 1.0).share)


def test_rows_of_zeros_must_be_equal():
    ours, theirs = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    assert wrong(ours, theirs) == []
    theirs[2, 0, 1, 4] = 1e-9
    assert wrong(ours, theirs) == [[2, 0, 1, 4]]
    assert compare_arrays(ours, theirs, 1e-2).share == np.inf
