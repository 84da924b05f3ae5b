"""The short convolution against float64, over padding and states of any content, however tokens are split; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.causal_conv1d import CASES, Case, check, make, run
from tests.kernels.recurrent import DTYPES, Place
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import causal_conv1d


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_states(memory, stream, name):
    check(Place(memory, stream), CASES[name])


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_dtype(memory, stream, dtypes):
    check(Place(memory, stream), Case(32, 5, slots=2, bias=True, silu=True, gates=True, dtypes=dtypes), seed=20)


@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize("parts", [(1,) * 20, (3, 17), (16, 4), (19, 1)])
def test_however_tokens_are_split(memory, stream, channels, parts):
    """Outputs and states are equal bit for bit."""
    case = Case(channels, 20, slots=2, bias=True, silu=True, gates=True, dtypes=("bfloat16", "bfloat16"))
    arrays, weight, bias, past = make(case, seed=40)
    place = Place(memory, stream)
    whole, state = run(place, case, arrays, weight, bias, past, None)
    first = 0
    for count in parts:
        piece = {name: array[:, first : first + count] for name, array in arrays.items()}
        out, past = run(place, case, piece, weight, bias, past, None)
        assert out.tobytes() == np.ascontiguousarray(whole[:, first : first + count]).tobytes()
        first += count
    assert past.tobytes() == state.tobytes()


def fitting(place, dtype="float16"):
    half = numpy_dtype(dtype)
    ones = np.ones((2, 3, 8), half)
    return {
        "x": place.tensor(ones), "weight": place.tensor(np.ones((8, 4), half)), "past": place.tensor(np.ones((2, 8, 4), half)),
        "present": place.tensor(np.zeros((2, 8, 4), half)), "out": place.tensor(0 * ones), "bias": place.tensor(np.ones(8, half)),
        "gate_in": place.tensor(ones), "gate_out": place.tensor(ones), "new_lengths": place.tensor(np.ones(2, np.int32)),
    }  # fmt: skip


REFUSED = [
    ("x", (2, 3, 8), "int8", DTypeError, "x: expected one of float16, bfloat16, float32, got int8."),
    ("x", (2, 24), "float16", ShapeError, r"x: expected a tensor \[B, s, channels\], got "),
    ("x", (2, 0, 8), "float16", ShapeError, r"x: expected a tensor \[B, s, channels\], got "),
    ("weight", (8, 5), "float16", ShapeError, r"weight: expected a tensor \[8, K\] with K one of \(2, 3, 4\), got "),
    ("weight", (7, 4), "float16", ShapeError, r"weight: expected shape \(8, 4\), got "),
    ("past", (2, 8, 3), "float16", ShapeError, r"past: expected shape \(2, 8, 4\), got "),
    ("past", (2, 8, 4), "bfloat16", DTypeError, "past: expected float16 or float32 for activations of float16, got bfloat16."),
    ("present", (2, 8, 4), "float32", DTypeError, "present: expected float16, got float32."),
    ("out", (2, 3, 7), "float16", ShapeError, r"out: expected shape \(2, 3, 8\), got "),
    ("bias", (4,), "float16", ShapeError, r"bias: expected shape \(8,\), got "),
    ("gate_in", (2, 3, 8), "float32", DTypeError, "gate_in: expected float16, got float32."),
    ("gate_out", (2, 2, 8), "float16", ShapeError, r"gate_out: expected shape \(2, 3, 8\), got "),
    ("new_lengths", (2,), "int64", DTypeError, "new_lengths: expected int32, got int64."),
    ("new_lengths", (3,), "int32", ShapeError, r"new_lengths: expected shape \(2,\), got "),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "error", "text"), REFUSED)
def test_what_does_not_fit(memory, stream, name, shape, dtype, error, text):
    place = Place(memory, stream)
    given = fitting(place)
    given[name] = place.tensor(np.zeros(shape, numpy_dtype(dtype)))
    refused(place, given, error, text)


def refused(place, given, error, text):
    left = [tensor for tensor in given.values() if isinstance(tensor, DeviceTensor) and not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    names = {"stream": place.stream, **given}
    with pytest.raises(error, match=text):
        causal_conv1d(names.pop("x"), names.pop("weight"), names.pop("past"), **names)
    assert [tensor.numpy().tobytes() for tensor in left] == before


def test_other_things_that_do_not_fit(memory, stream):
    place = Place(memory, stream)
    given = fitting(place)
    refused(place, {**given, "out": given["x"]}, LayoutError, "out: expected a tensor of its own, got x itself.")
    refused(place, {**given, "gate_in": 3}, PlaceError, "gate_in: expected a DeviceTensor, got int.")
    refused(place, {**given, "stream": None}, PlaceError, "stream: expected ")
    numbers = place.tensor(np.zeros(96, np.float16)).allocation
    strided = DeviceTensor(numbers, shape=(2, 3, 8), dtype="float16", strides=(48, 16, 2))
    refused(place, {**given, "gate_out": strided}, LayoutError, "gate_out: expected a dense row for each token, got ")
    misplaced = DeviceTensor(numbers, shape=(2, 8, 4), dtype="float16", offset=2)
    refused(place, {**given, "past": misplaced}, LayoutError, "past: expected a dense tensor at a multiple of 16 bytes, got ")
    given["bias"].allocation.close()
    refused(place, given, KVCacheError, "bias: ")
