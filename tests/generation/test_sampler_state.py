"""The seed and the counter of a sampler, in the range that sampling accepts."""

import numpy as np
import pytest

from trt_kvcache.errors import RangeError
from trt_kvcache.generation.sampler_state import SamplerState


def test_numpy_integers_become_plain_ones():
    state = SamplerState(seed=np.int64(3), counter=np.int32(2))
    assert [type(value) for value in (state.seed, state.counter)] == [int, int]


@pytest.mark.parametrize(
    ("seed", "counter", "text"),
    [
        (True, 0, "SamplerState.seed: expected an integer, got True."),
        (0, 1.5, "SamplerState.counter: expected an integer, got 1.5."),
        (1 << 63, 0, "SamplingParams.seed: expected an integer from 0 to 9223372036854775807, got 9223372036854775808."),
        (0, -1, "SamplingParams.counter: expected at least 0, got -1."),
    ],
)
def test_values_out_of_range_are_refused(seed, counter, text):
    with pytest.raises(RangeError) as caught:
        SamplerState(seed=seed, counter=counter)
    assert str(caught.value) == text
