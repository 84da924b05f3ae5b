"""``Weights``: the checkpoint's memory where the dtype is right, converted copies elsewhere."""

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.errors import BuildError


class Stored:
    """A checkpoint of one tensor."""

    def __init__(self, array):
        self.array = array

    def tensor(self, name):
        assert name == "w"
        return self.array


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_conversion_rounds_each_value(stored, dtype):
    values = np.array([[1.0, -2.5, 1 / 3], [7e-3, 1000.0, 0.0]], stored)
    converted = Weights(Stored(values), dtype)("w")
    expected = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    assert converted.dtype == expected
    np.testing.assert_array_equal(converted, values.astype(np.float32).astype(expected))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_value_beyond_float16_is_refused(stored):
    message = r"weight `w`: it holds (float32|bfloat16) values that float16 cannot hold .* dtype bfloat16 or float32"
    with pytest.raises(BuildError, match=message):
        Weights(Stored(np.array([1.0, 70000.0], stored)), "float16")("w")
    assert Weights(Stored(np.array([65504.0], np.float32)), "float16")("w")[0] == 65504.0
