"""Shapes, strides, offsets and sizes against numbers written out by hand, and against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache.memory import shapes
from trt_kvcache.memory.shapes import is_dense

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


def test_numbers():
    sizes = {0: 0, 1: 256, 255: 256, 256: 256, 257: 512, 2**40 + 1: 2**40 + 256}
    assert {nbytes: shapes.align_up(nbytes) for nbytes in sizes} == sizes
    strides = {(): (), (5,): (1,), (3, 2, 7, 16): (224, 112, 16, 1), (2, 0, 3): (0, 3, 1)}
    assert {shape: shapes.row_major_strides(shape) for shape in strides} == strides
    assert shapes.span_elements((3, 2, 7), (100, 10, 1)) == 1 + 200 + 10 + 6
    assert (shapes.span_elements((3, 0, 7), (100, 10, 1)), shapes.span_elements((), ())) == (0, 1)
    assert (shapes.dense_nbytes((3, 2, 7, 16), "float32"), shapes.dense_nbytes((), "int64")) == (2688, 8)
    assert (shapes.row_nbytes(16, "bfloat16"), shapes.slot_kv_nbytes(2, 7, 16, "float8_e4m3fn")) == (32, 224)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 2, 7), (14, 7, 1), True),
        ((3, 2, 7), (28, 7, 1), False),
        ((3, 2, 7), (14, 7, 2), False),
        ((3, 1, 7), (7, 999, 1), True),  # the stride of a dimension of size 1 is never used
        ((3, 0, 7), (999, 999, 999), True),
    ],
)
def test_is_dense(shape, strides, dense):
    assert is_dense(shape, strides) is dense


@given(SHAPES, st.permutations(range(4)))
def test_strides_and_density_agree_with_numpy(shape, order):
    array = np.empty(shape, np.int8)
    strides = shapes.row_major_strides(shape)
    assert is_dense(shape, strides)
    assert shapes.span_elements(shape, strides) == array.size
    assert not array.size or array.strides == strides
    view = array.transpose([axis for axis in order if axis < len(shape)])
    assert is_dense(view.shape, view.strides) == view.flags.c_contiguous
