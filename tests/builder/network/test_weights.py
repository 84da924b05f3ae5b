"""``Weights``: the checkpoint's memory where the dtype is right, converted copies elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trt_kvcache.builder.network.weights import Weights
from trt_kvcache.errors import BuildError


class Stored:
    """A checkpoint of one tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def tensor(self, name: str) -> np.ndarray:
        assert name == "w"
        return self.array

    def quantized_weight(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        pass


def test_same_dtype_is_the_stored_array() -> None:
    stored = np.ones((2, 3), np.float16)
    assert Weights(Stored(stored), "float16")("w") is stored


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_conversion_rounds_each_value(stored: type, dtype: str) -> None:
    values = np.array([[1.0, -2.5, 1 / 3], [7e-3, 1000.0, 0.0]], stored)
    converted = Weights(Stored(values), dtype)("w")
    expected = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    assert converted.dtype == expected
    np.testing.assert_array_equal(converted, values.astype(np.float32).astype(expected))


def test_value_beyond_float16_is_refused() -> None:
    for stored in (np.float32, ml_dtypes.bfloat16):
        weights = Weights(Stored(np.array([1.0, 70000.0], stored)), "float16")
        with pytest.raises(
            BuildError, match=r"weight `w`: it holds (float32|bfloat16) values that float16 cannot hold .* dtype bfloat16 or float32"
        ):
            weights("w")
    largest = Weights(Stored(np.array([65504.0], np.float32)), "float16")("w")
    assert largest[0] == 65504.0
