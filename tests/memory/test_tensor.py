"""``DeviceTensor``: what a view is, its slices and reshapes, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import DeviceTensor
from trt_kvcache.errors import LayoutError, ShapeError


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


def test_what_it_is(memory, allocation, dense, strided):
    assert (dense.shape, dense.strides, dense.dtype, dense.ndim, dense.offset) == ((3, 5, 7), (35, 7, 1), "int32", 3, 0)
    assert (dense.nbytes, dense.is_contiguous, len(dense), dense.ptr) == (420, True, 3, allocation.ptr)
    assert (dense.allocation, dense.memory, dense.__dlpack_device__()) == (allocation, memory, memory.dlpack_device)
    assert repr(dense) == f"DeviceTensor((3, 5, 7), int32, {memory.device})"
    assert (strided.nbytes, strided.is_contiguous, strided.ptr) == (120, False, allocation.ptr + 4)
    assert strided.numpy().tolist() == np.arange(105).reshape(3, 5, 7)[:, :, 1:3].tolist()
    assert repr(strided) == f"DeviceTensor((3, 5, 2), int32, strides=(35, 7, 1), {memory.device})"
    with pytest.raises(AttributeError):
        dense.shape = (105,)


def test_no_dimensions(allocation):
    scalar = DeviceTensor(allocation, shape=(), dtype="int32", offset=28)
    assert (scalar.shape, scalar.strides, scalar.nbytes, scalar.numpy().tolist()) == ((), (), 4, 7)
    with pytest.raises(ShapeError, match=r"^DeviceTensor: a tensor without dimensions cannot be sliced\.$"):
        scalar[0:0]


NO_VIEW, ENDS = "do not describe a view.", "of an allocation of 420."
REFUSED = [
    ({"shape": (3, 5), "strides": (-5, 1)}, f"shape (3, 5), strides (-5, 1), offset 0 {NO_VIEW}"),
    ({"shape": (106,)}, f"a view of (106,) int32 ends at byte 424 {ENDS}"),
    ({"shape": (2, 2), "strides": (104, 1)}, f"a view of (2, 2) int32 ends at byte 424 {ENDS}"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_views_that_do_not_fit(allocation, arguments, message):
    with pytest.raises(ShapeError) as caught:
        DeviceTensor(allocation, dtype="int32", **arguments)
    assert str(caught.value) == f"DeviceTensor: {message}"


@given(data=st.data())
def test_slices_are_those_of_numpy(dense, strided, data):
    tensor = data.draw(st.sampled_from([dense, strided]))
    start = data.draw(st.integers(0, 3))
    stop = data.draw(st.integers(start, 3))
    for given_start, given_stop in ((start, stop), (start or None, stop if stop < 3 else None)):
        view = tensor[given_start:given_stop]
        assert view.numpy().tolist() == tensor.numpy()[start:stop].tolist()
        assert (view.shape, view.strides) == ((stop - start, *tensor.shape[1:]), tensor.strides)
        assert view.ptr == tensor.ptr + start * 140


SLICES = [
    (slice(-1, 3), "0 <= start <= stop <= 3, got [-1:3]. Slices never wrap."),
    (slice(0, 4), "0 <= start <= stop <= 3, got [0:4]. Slices never wrap."),
    (1, "a slice [start:stop] of dimension 0, got 1."),
]


@pytest.mark.parametrize(("index", "message"), SLICES)
def test_slices_that_are_refused(dense, index, message):
    with pytest.raises(ShapeError) as caught:
        dense[index]
    assert str(caught.value) == f"DeviceTensor: expected {message}"
    assert dense[::1].shape == (3, 5, 7)


def test_reshape(dense):
    view = dense.reshape(7, 15)
    assert (view.ptr, view.shape, view.is_contiguous) == (dense.ptr, (7, 15), True)
    assert dense[1:2].reshape(7, 5).numpy().tolist() == np.arange(35, 70).reshape(7, 5).tolist()


def test_reshapes_that_are_refused(dense, strided):
    with pytest.raises(ShapeError, match=r"^DeviceTensor\.reshape: \(3, 5, 7\) has other elements than \(3, 5\)\.$"):
        dense.reshape(3, 5)
    message = r"^DeviceTensor\.reshape: a view of shape \(3, 5, 2\) with strides \(35, 7, 1\) is not dense\.$"
    with pytest.raises(LayoutError, match=message):
        strided.reshape(30)
