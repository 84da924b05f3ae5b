"""Increment and store lengths: every memory, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.errors import DTypeError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import MAX_STORED_VALUES, increment_length_tensor, store_length_values

INT32_MAX = 2**31 - 1


def tensor_of(memory: Any, values: Any, stream: Any, dtype: Any = np.int32) -> DeviceTensor:
    return memory.to_device(np.array(values, dtype), stream=stream)


@pytest.fixture
def inner(memory, stream):
    """Five lengths between three others on either side, which must stay as they are."""
    return tensor_of(memory, [-7, -8, -9, 3, 0, 12, 5, 1, -7, -8, -9], stream)


def whole(tensor: DeviceTensor) -> list[int]:
    return DeviceTensor(tensor.allocation, shape=(11,), dtype="int32").numpy().tolist()


class TestIncrement:
    @pytest.mark.parametrize("increment", [0, 1, -2, 2**30, np.int64(4)])
    def test_by_a_number(self, inner, stream, increment):
        increment_length_tensor(inner[3:8], increment, stream=stream)
        assert whole(inner) == [-7, -8, -9, *(length + increment for length in (3, 0, 12, 5, 1)), -7, -8, -9]

    def test_by_a_tensor(self, memory, inner, stream):
        increments = tensor_of(memory, [99, 4, 0, 1, 7, -1, 99], stream)
        increment_length_tensor(inner[3:8], increments[1:6], stream=stream)
        assert whole(inner) == [-7, -8, -9, 7, 0, 13, 12, 0, -7, -8, -9]
        assert increments.numpy().tolist() == [99, 4, 0, 1, 7, -1, 99]

    def test_by_itself(self, memory, stream):
        lengths = tensor_of(memory, [3, 0, 12], stream)
        increment_length_tensor(lengths, lengths, stream=stream)
        assert lengths.numpy().tolist() == [6, 0, 24]

    def test_no_slot(self, memory, inner, stream):
        increment_length_tensor(inner[3:3], 4, stream=stream)
        increment_length_tensor(inner[3:3], inner[0:0], stream=stream)
        assert whole(inner)[3:8] == [3, 0, 12, 5, 1]


class TestStore:
    @pytest.mark.parametrize(("accumulate", "expected"), [(False, [4, 0, 9, -1, 2]), (True, [7, 0, 21, 4, 3])])
    def test_values(self, inner, stream, accumulate, expected):
        store_length_values(inner[3:8], [4, 0, 9, -1, 2], accumulate=accumulate, stream=stream)
        assert whole(inner) == [-7, -8, -9, *expected, -7, -8, -9]

    @pytest.mark.parametrize("n", [MAX_STORED_VALUES - 1, MAX_STORED_VALUES, MAX_STORED_VALUES + 1, 2 * MAX_STORED_VALUES + 5])
    def test_more_than_one_launch_carries(self, memory, stream, n):
        lengths = tensor_of(memory, np.arange(n) * 100, stream)
        store_length_values(lengths, list(range(1, n + 1)), accumulate=True, stream=stream)
        assert lengths.numpy().tolist() == [100 * i + i + 1 for i in range(n)]
        store_length_values(lengths, tuple(range(n)), accumulate=False, stream=stream)
        assert lengths.numpy().tolist() == list(range(n))

    def test_numbers_of_numpy(self, memory, stream):
        lengths = tensor_of(memory, [1, 2, 3], stream)
        store_length_values(lengths, list(np.array([5, -6, 7], np.int32)), accumulate=False, stream=stream)
        assert lengths.numpy().tolist() == [5, -6, 7]

    def test_no_value(self, inner, stream):
        store_length_values(inner[3:3], [], accumulate=False, stream=stream)
        assert whole(inner)[3:8] == [3, 0, 12, 5, 1]

    def test_the_list_may_change_afterwards(self, memory, stream):
        lengths, values = tensor_of(memory, [0, 0], stream), [5, 6]
        store_length_values(lengths, values, accumulate=False, stream=stream)
        values[:] = [-1, -1]
        assert lengths.numpy().tolist() == [5, 6]


class TestRefused:
    @pytest.fixture
    def refuse(self, memory, stream):
        """Return a function: the call raises the message, and the lengths stay."""

        def check(tensor, call, error, message):
            before = tensor.numpy().tolist()
            with pytest.raises(error) as caught:
                call(tensor)
            assert str(caught.value) == message
            assert tensor.numpy().tolist() == before

        return check

    @pytest.fixture(params=["increment", "store"])
    def call(self, request, stream):
        """Either function, with arguments that would fit two lengths."""
        if request.param == "increment":
            return lambda tensor: increment_length_tensor(tensor, 1, stream=stream)
        return lambda tensor: store_length_values(tensor, [1, 1], accumulate=False, stream=stream)

    def test_dtype_of_lengths(self, memory, stream, refuse, call):
        tensor = tensor_of(memory, [1, 2], stream, np.int64)
        refuse(tensor, call, DTypeError, "length_tensor: expected int32, got int64.")

    def test_shape_of_lengths(self, memory, stream, refuse, call):
        tensor = tensor_of(memory, [[1, 2]], stream)
        message = f"length_tensor: expected a dense tensor of shape (n,), got DeviceTensor((1, 2), int32, {memory.device})."
        refuse(tensor, call, ShapeError, message)

    def test_strides_of_lengths(self, memory, stream, refuse, call):
        tensor = DeviceTensor(tensor_of(memory, [1, 2, 3, 4], stream).allocation, shape=(2,), strides=(2,), dtype="int32")
        message = f"length_tensor: expected a dense tensor of shape (n,), got DeviceTensor((2,), int32, strides=(2,), {memory.device})."
        refuse(tensor, call, ShapeError, message)

    def test_foreign_stream(self, memory, stream, refuse):
        tensor = tensor_of(memory, [1, 2], stream)
        for call in (
            lambda tensor: increment_length_tensor(tensor, 1, stream=None),
            lambda tensor: increment_length_tensor(tensor, tensor, stream=None),
            lambda tensor: store_length_values(tensor, [1, 1], accumulate=False, stream=None),
        ):
            with pytest.raises(PlaceError, match=r"^stream: expected .*, got NoneType\.$"):
                call(tensor)
        assert tensor.numpy().tolist() == [1, 2]

    @pytest.mark.parametrize(
        ("increment", "message"),
        [
            (INT32_MAX + 1, "increment: expected an int32, got 2147483648."),
            (-INT32_MAX - 1, "increment: expected an int32, got -2147483648."),
            (1.0, "increment: expected an integer, got 1.0."),
            (True, "increment: expected an integer, got True."),
            ([1, 2], "increment: expected an integer, got [1, 2]."),
        ],
    )
    def test_number(self, memory, stream, refuse, increment, message):
        tensor = tensor_of(memory, [1, 2], stream)
        refuse(tensor, lambda tensor: increment_length_tensor(tensor, increment, stream=stream), RangeError, message)

    def test_tensor_of_increments(self, memory, stream, refuse):
        tensor = tensor_of(memory, [1, 2], stream)
        host = HostMemory()
        foreign = tensor_of(host, [1, 1], host.create_stream())
        strided = DeviceTensor(tensor_of(memory, [1, 2, 3, 4], stream).allocation, shape=(2,), strides=(2,), dtype="int32")
        dense = "increment: expected a dense tensor of shape (2,), got DeviceTensor"
        for increments, error, message in (
            (foreign, PlaceError, f"increment: expected a tensor of {memory.device}, got one of cpu."),
            (tensor_of(memory, [1, 1], stream, np.int64), DTypeError, "increment: expected int32, got int64."),
            (tensor_of(memory, [1, 1, 1], stream), ShapeError, f"{dense}((3,), int32, {memory.device})."),
            (strided, ShapeError, f"{dense}((2,), int32, strides=(2,), {memory.device})."),
        ):
            refuse(tensor, lambda tensor, by=increments: increment_length_tensor(tensor, by, stream=stream), error, message)

    @pytest.mark.parametrize("accumulate", [False, True])
    @pytest.mark.parametrize(
        ("values", "error", "message"),
        [
            ([1], ShapeError, "values: expected 2 of them, got 1."),
            ([1, 2, 3], ShapeError, "values: expected 2 of them, got 3."),
            ([1, INT32_MAX + 1], RangeError, "values: expected int32 values, got [1, 2147483648]."),
        ],
    )
    def test_values(self, memory, stream, refuse, accumulate, values, error, message):
        tensor = tensor_of(memory, [1, 2], stream)
        refuse(tensor, lambda tensor: store_length_values(tensor, values, accumulate=accumulate, stream=stream), error, message)
