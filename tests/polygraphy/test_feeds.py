import numpy as np
import pytest

from trt_kvcache.errors import DTypeError, RangeError, ShapeError
from trt_kvcache.polygraphy.feeds import complete_feed, make_feed, read_feed


def test_a_feed_is_right_padded_and_read_back_up_to_each_new_length():
    feed = make_feed([[5, 6, 7], [], [8]], reset=True)
    assert {name: (array.dtype.name, array.tolist()) for name, array in feed.items()} == {
        "input_ids": ("int32", [[5, 6, 7], [0, 0, 0], [8, 0, 0]]),
        "new_lengths": ("int32", [3, 0, 1]),
        "reset": ("bool", [True]),
    }
    feed["input_ids"][1:, 1:] = 99
    assert read_feed(feed) == ([[5, 6, 7], [], [8]], True)
    del feed["reset"]
    assert complete_feed(feed)["reset"].tolist() == [False]


IDS = np.array([[1, 2], [3, 4]], np.int32)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"input_ids": np.array([[0, 2**32 + 1]])}, RangeError, "`input_ids`: expected values that int32 holds, got 0 to 4294967297."),
        ({"input_ids": np.array([[1.5]])}, DTypeError, "`input_ids`: expected int32 or int64, got float64."),
        ({"new_lengths": np.array([1] * 3)}, ShapeError, "`new_lengths`: expected shape (2,), one per row of `input_ids`, got (3,)."),
        ({"new_lengths": np.array([2, 3])}, RangeError, "`new_lengths`[1]: expected 0 to 2, the width of `input_ids`, got 3."),
    ],
)
def test_arrays_that_are_refused(changes, error, text):
    with pytest.raises(error) as raised:
        read_feed(complete_feed({"input_ids": IDS, "new_lengths": np.array([2, 1]), **changes}))
    assert str(raised.value) == text
