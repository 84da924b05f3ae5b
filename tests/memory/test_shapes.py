"""Shapes, strides, offsets and sizes against numbers written out by hand, and against NumPy."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from trt_kvcache.memory.shapes import (
    ALIGNMENT,
    align_up,
    dense_nbytes,
    is_dense,
    row_major_strides,
    row_nbytes,
    span_elements,
)

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@pytest.mark.parametrize(("nbytes", "aligned"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512), (2**40 + 1, 2**40 + 256)])
def test_align_up(nbytes, aligned):
    assert align_up(nbytes) == aligned
    assert ALIGNMENT == 256


@pytest.mark.parametrize(("shape", "strides"), [((), ()), ((5,), (1,)), ((3, 2, 7, 16), (224, 112, 16, 1)), ((2, 0, 3), (0, 3, 1))])
def test_row_major_strides(shape, strides):
    assert row_major_strides(shape) == strides


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 2, 7), (14, 7, 1), True),
        ((3, 2, 7), (28, 7, 1), False),
        ((3, 2, 7), (14, 7, 2), False),
        ((2, 3), (1, 2), False),  # column-major
        ((1, 2, 7), (999, 7, 1), True),  # the stride of a dimension of size 1 is never used
        ((3, 1, 7), (7, 999, 1), True),
        ((3, 7, 1), (7, 1, 999), True),
        ((3, 0, 7), (999, 999, 999), True),
        ((), (), True),
        ((2,), (0,), False),
    ],
)
def test_is_dense(shape, strides, dense):
    assert is_dense(shape, strides) is dense


@given(SHAPES)
def test_strides_and_density_agree_with_numpy(shape):
    array = np.empty(shape, np.int8)
    strides = row_major_strides(shape)
    assert is_dense(shape, strides)
    assert span_elements(shape, strides) == array.size
    if array.size:
        assert array.strides == strides


@given(SHAPES, st.permutations(range(4)))
def test_density_of_a_transposed_view_agrees_with_numpy(shape, order):
    axes = [axis for axis in order if axis < len(shape)]
    array = np.empty(shape, np.int8).transpose(axes)
    assert is_dense(array.shape, array.strides) == array.flags.c_contiguous


def test_span_elements_of_a_strided_view():
    assert span_elements((3, 2, 7), (100, 10, 1)) == 1 + 200 + 10 + 6
    assert span_elements((3, 0, 7), (100, 10, 1)) == 0
    assert span_elements((), ()) == 1


def test_sizes():
    assert dense_nbytes((3, 2, 7, 16), "float32") == 2688
    assert dense_nbytes((), "int64") == 8
    assert row_nbytes(16, "bfloat16") == 32
