"""``DeviceTensor``: what a view is, its slices and reshapes, and what it refuses."""

import copy
import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, LayoutError, ShapeError


@pytest.fixture
def allocation(memory, stream):
    """The int32 numbers 0 to 104."""
    return memory.to_device(np.arange(105, dtype=np.int32), stream=stream).allocation


@pytest.fixture
def dense(allocation):
    return DeviceTensor(allocation, shape=(3, 5, 7), dtype="int32")


@pytest.fixture
def strided(allocation):
    """[3, 5, 2] inside the dense [3, 5, 7], from its second column on."""
    return DeviceTensor(allocation, shape=(3, 5, 2), strides=(35, 7, 1), dtype="int32", offset=4)


class TestWhatItIs:
    def test_dense(self, memory, allocation, dense):
        assert (dense.shape, dense.strides, dense.dtype, dense.ndim, dense.offset) == ((3, 5, 7), (35, 7, 1), "int32", 3, 0)
        assert (dense.nbytes, dense.is_contiguous, len(dense)) == (420, True, 3)
        assert dense.ptr == allocation.ptr
        assert dense.allocation is allocation
        assert dense.memory is memory
        assert dense.__dlpack_device__() == memory.dlpack_device
        assert dense.numpy().tolist() == np.arange(105).reshape(3, 5, 7).tolist()
        assert repr(dense) == f"DeviceTensor((3, 5, 7), int32, {memory.device})"

    def test_strided(self, memory, allocation, strided):
        assert (strided.nbytes, strided.is_contiguous, strided.ptr) == (120, False, allocation.ptr + 4)
        assert strided.numpy().tolist() == np.arange(105).reshape(3, 5, 7)[:, :, 1:3].tolist()
        assert repr(strided) == f"DeviceTensor((3, 5, 2), int32, strides=(35, 7, 1), {memory.device})"

    @pytest.mark.parametrize(
        ("shape", "strides", "expected"),
        [
            ((3, 5), (5, 1), True),
            ((3, 1, 5), (5, 99, 1), True),
            ((1, 5), (99, 1), True),
            ((3, 5), (6, 1), False),
            ((3, 5), (1, 3), False),
            ((3, 0), (99, 99), True),
            ((), (), True),
        ],
    )
    def test_dimensions_of_size_one_do_not_count(self, allocation, shape, strides, expected):
        assert DeviceTensor(allocation, shape=shape, strides=strides, dtype="int32").is_contiguous is expected

    def test_no_dimensions(self, allocation):
        scalar = DeviceTensor(allocation, shape=(), dtype="int32", offset=28)
        assert (scalar.shape, scalar.strides, scalar.nbytes, scalar.numpy().tolist()) == ((), (), 4, 7)
        with pytest.raises(TypeError, match=r"^len\(\) of a DeviceTensor without dimensions$"):
            len(scalar)

    def test_it_cannot_be_changed(self, dense):
        for name in ("ptr", "shape", "strides", "dtype", "anything"):
            with pytest.raises(AttributeError):
                setattr(dense, name, 1)
            with pytest.raises(AttributeError):
                delattr(dense, name)
        assert (dense.shape, dense.dtype) == ((3, 5, 7), "int32")

    def test_a_copy_is_the_same_view(self, dense):
        assert copy.copy(dense) is dense

    def test_it_names_its_numpy_dtype(self, allocation):
        for name in ("float16", "bfloat16", "int8"):
            assert DeviceTensor(allocation, shape=(2,), dtype=name).numpy_dtype == numpy_dtype(name)

    def test_it_keeps_its_owner(self, memory, stream):
        view = memory.to_device(np.arange(6, dtype=np.int32), stream=stream)[2:4]
        gc.collect()
        assert memory.live_nbytes == 24
        assert view.numpy().tolist() == [2, 3]


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shape": (3, -1)}, "shape (3, -1), strides (-1, 1), offset 0 do not describe a view."),
            ({"shape": (3, 5), "strides": (5,)}, "shape (3, 5), strides (5,), offset 0 do not describe a view."),
            ({"shape": (3, 5), "strides": (-5, 1)}, "shape (3, 5), strides (-5, 1), offset 0 do not describe a view."),
            ({"shape": (3, 5), "offset": -4}, "shape (3, 5), strides (5, 1), offset -4 do not describe a view."),
            ({"shape": (106,)}, "a view of (106,) int32 ends at byte 424 of an allocation of 420."),
            ({"shape": (105,), "offset": 1}, "a view of (105,) int32 ends at byte 421 of an allocation of 420."),
            ({"shape": (2, 2), "strides": (104, 1)}, "a view of (2, 2) int32 ends at byte 424 of an allocation of 420."),
        ],
    )
    def test_views_that_do_not_fit(self, allocation, arguments, message):
        with pytest.raises(ShapeError) as caught:
            DeviceTensor(allocation, dtype="int32", **arguments)
        assert str(caught.value) == f"DeviceTensor: {message}"

    def test_last_element_at_the_last_byte(self, allocation):
        assert DeviceTensor(allocation, shape=(2, 2), strides=(103, 1), dtype="int32").numpy().tolist() == [[0, 1], [103, 104]]

    @pytest.mark.parametrize("dtype", ["float64", "int32 ", None, np.int32])
    def test_dtype(self, allocation, dtype):
        with raises(DTypeError, "dtype", expected="float16"):
            DeviceTensor(allocation, shape=(3,), dtype=dtype)


class TestSlice:
    @given(data=st.data())
    def test_as_numpy_slices(self, dense, strided, data):
        tensor = data.draw(st.sampled_from([dense, strided]))
        start = data.draw(st.integers(0, 3))
        stop = data.draw(st.integers(start, 3))
        view = tensor[start:stop]
        assert view.numpy().tolist() == tensor.numpy()[start:stop].tolist()
        assert (view.shape, view.strides) == ((stop - start, *tensor.shape[1:]), tensor.strides)
        assert view.ptr == tensor.ptr + start * 140

    def test_open_ends(self, dense):
        assert dense[1:].shape == (2, 5, 7)
        assert dense[:2].shape == (2, 5, 7)
        assert dense[:].shape == dense[::1].shape == (3, 5, 7)
        assert dense[1:][1:].ptr == dense[2:].ptr

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (slice(-1, 3), "expected 0 <= start <= stop <= 3, got [-1:3]. Slices never wrap."),
            (slice(0, -1), "expected 0 <= start <= stop <= 3, got [0:-1]. Slices never wrap."),
            (slice(0, 4), "expected 0 <= start <= stop <= 3, got [0:4]. Slices never wrap."),
            (slice(2, 1), "expected 0 <= start <= stop <= 3, got [2:1]. Slices never wrap."),
            (slice(0, 3, 2), "expected a slice [start:stop] of dimension 0, got slice(0, 3, 2)."),
            (1, "expected a slice [start:stop] of dimension 0, got 1."),
            ((slice(0, 1), slice(0, 1)), "expected a slice [start:stop] of dimension 0, got (slice(0, 1, None), slice(0, 1, None))."),
        ],
    )
    def test_refused(self, dense, index, message):
        with pytest.raises(ShapeError) as caught:
            dense[index]
        assert str(caught.value) == f"DeviceTensor: {message}"

    def test_no_dimensions(self, allocation):
        with pytest.raises(ShapeError, match=r"^DeviceTensor: a tensor without dimensions cannot be sliced\.$"):
            DeviceTensor(allocation, shape=(), dtype="int32")[0:0]


class TestReshape:
    @pytest.mark.parametrize("shape", [(105,), (7, 15), (1, 105, 1), (3, 5, 7)])
    def test_same_elements(self, dense, shape):
        view = dense.reshape(*shape)
        assert (view.ptr, view.shape, view.is_contiguous) == (dense.ptr, shape, True)
        assert view.numpy().tolist() == dense.numpy().reshape(shape).tolist()

    def test_of_a_slice(self, dense):
        assert dense[1:2].reshape(7, 5).numpy().tolist() == np.arange(35, 70).reshape(7, 5).tolist()

    def test_refused(self, dense, strided):
        with raises(ShapeError, "DeviceTensor.reshape", expected="(3, 5, 7)", got="(3, 5)"):
            dense.reshape(3, 5)
        message = r"^DeviceTensor\.reshape: a view of shape \(3, 5, 2\) with strides \(35, 7, 1\) is not dense\.$"
        with pytest.raises(LayoutError, match=message):
            strided.reshape(30)
