"""The gated delta rule against float64, over padding of any content, however tokens are split; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.delta_rule import CASES, Case, check, delta, make, run
from tests.kernels.recurrent import DTYPES, TOLERANCE, Place, check_slots
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import gated_delta_rule


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_states(memory, stream, name):
    check(Place(memory, stream), CASES[name])


@pytest.mark.parametrize("width", [1, 18])
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_dtype(memory, stream, dtypes, width):
    check(Place(memory, stream), Case(2, 32, 48, width=width, slots=2, dtypes=dtypes), seed=30)


def test_a_step_of_published_sizes(memory, stream):
    """Qwen3-Next and Qwen3.5."""
    check(Place(memory, stream), Case(32, 128, 128, key_heads=16, dtypes=("bfloat16", "float32")))


@pytest.mark.parametrize("parts", [(1,) * 24, (1, 23), (16, 8), (17, 1, 6)])
def test_however_tokens_are_split(memory, stream, parts):
    case = Case(2, 24, 40, width=24, slots=2)
    arrays, parameters, past = make(case, seed=60)
    wanted, state = delta(arrays, parameters, past, [24, 24])
    place, first = Place(memory, stream), 0
    for count in parts:
        out, past = run(place, case, {name: array[:, first : first + count] for name, array in arrays.items()}, parameters, past, None)
        check_slots(out, wanted[:, first : first + count], TOLERANCE["float16"])
        first += count
    check_slots(past, state, TOLERANCE["float32"])


def fitting(place):
    """Arguments that fit: 4 heads of 24 over 2 key heads of 16, for 2 slots of 3 tokens."""

    def zeros(*shape, dtype=np.float16):
        return place.tensor(np.zeros(shape, dtype))

    return {
        "q": zeros(2, 3, 2, 16), "k": zeros(2, 3, 2, 16), "v": zeros(2, 3, 4, 24), "a": zeros(2, 3, 4), "b": zeros(2, 3, 4),
        "past": zeros(2, 4, 16, 24), "present": zeros(2, 4, 16, 24), "out": zeros(2, 3, 4, 24), "new_lengths": zeros(2, dtype=np.int32),
        "decay": zeros(4, dtype=np.float32), "dt_bias": zeros(4, dtype=np.float32),
    }  # fmt: skip


V = r"v: expected a tensor \[2, 3, heads, value_dim\] with heads a multiple of 2 and value_dim one of 8, got "
REFUSED = [
    ("q", (2, 3, 32), "float16", ShapeError, r"q: expected a tensor \[B, s, key_heads, key_dim\], got "),
    ("q", (2, 3, 2, 12), "float16", ShapeError, "q: expected a key_dim that is a multiple of 8, up to 128, got "),
    ("q", (2, 3, 2, 136), "float16", ShapeError, "q: expected a key_dim that is a multiple of 8, up to 128, got "),
    ("q", (2, 3, 2, 16), "int32", DTypeError, "q: expected one of float16, bfloat16, float32, got int32."),
    ("k", (2, 3, 1, 16), "float16", ShapeError, r"k: expected shape \(2, 3, 2, 16\), got "),
    ("v", (2, 3, 3, 24), "float16", ShapeError, V),
    ("v", (2, 3, 4, 20), "float16", ShapeError, V),
    ("v", (2, 2, 4, 24), "float16", ShapeError, r"v: expected shape \(2, 3, 4, 24\), got "),
    ("a", (2, 3, 2), "float16", ShapeError, r"a: expected shape \(2, 3, 4\), got "),
    ("b", (2, 3, 4), "float32", DTypeError, "b: expected float16, got float32."),
    ("past", (2, 4, 24, 16), "float16", ShapeError, r"past: expected shape \(2, 4, 16, 24\), got "),
    ("past", (2, 4, 16, 24), "bfloat16", DTypeError, "past: expected float16 or float32 for activations of float16, got bfloat16."),
    ("present", (2, 4, 16, 24), "float32", DTypeError, "present: expected float16, got float32."),
    ("out", (2, 3, 2, 16), "float16", ShapeError, r"out: expected shape \(2, 3, 4, 24\), got "),
    ("decay", (4,), "float16", DTypeError, "decay: expected float32, got float16."),
    ("dt_bias", (2,), "float32", ShapeError, r"dt_bias: expected shape \(4,\), got "),
    ("new_lengths", (2,), "int64", DTypeError, "new_lengths: expected int32, got int64."),
]


def refused(place, given, error, text):
    left = [tensor for tensor in given.values() if isinstance(tensor, DeviceTensor) and not tensor.allocation.closed]
    before = [tensor.numpy().tobytes() for tensor in left]
    with pytest.raises(error, match=text):
        gated_delta_rule(**{"stream": place.stream, **given})
    assert [tensor.numpy().tobytes() for tensor in left] == before


@pytest.mark.parametrize(("name", "shape", "dtype", "error", "text"), REFUSED)
def test_what_does_not_fit(memory, stream, name, shape, dtype, error, text):
    place = Place(memory, stream)
    refused(place, {**fitting(place), name: place.tensor(np.ones(shape, numpy_dtype(dtype)))}, error, text)


def test_other_things_that_do_not_fit(memory, stream):
    place = Place(memory, stream)
    given = fitting(place)
    refused(place, {**given, "decay": None}, PlaceError, "decay: expected a DeviceTensor, got NoneType.")
    refused(place, {**given, "stream": None}, PlaceError, "stream: expected ")
    misplaced = place.packed([np.zeros((2, 3, 2, 16), np.float16)], rows=37)[0]
    refused(place, {**given, "k": misplaced}, LayoutError, "k: expected tokens at multiples of 16 bytes, got ")
    given["b"].allocation.close()
    refused(place, given, KVCacheError, "b: ")
