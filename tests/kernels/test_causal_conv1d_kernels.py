"""The short convolution against float64, over padding and states of any content, however tokens are split; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.causal_conv1d import CASES, Case, check, make, run
from tests.kernels.recurrent import DTYPES, Place, host_place, refused
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import causal_conv1d
from trt_kvcache.kernels.causal_conv1d_kernels import CausalConv1dParams, causal_conv1d_plan


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


@pytest.mark.parametrize(
    ("case", "name", "tile_tokens"),
    [
        (Case(8448, 1, dtypes=("bfloat16", "bfloat16")), "causal_conv1d_update", 4),
        (Case(2048, 500), "causal_conv1d", 4),
        (Case(8448, 2048), "causal_conv1d", 36),
        (Case(8448, 8192), "causal_conv1d", 48),
        (Case(8448, 300, slots=100), "causal_conv1d", 60),
        (Case(7, 1), "causal_conv1d_any", 4),
    ],
)
def test_which_kernel_runs(case, name, tile_tokens):
    place = host_place()
    x, weight, past = (
        place.zeros(*shape, dtype=numpy_dtype(dtype))
        for shape, dtype in (
            ((case.slots, case.width, case.channels), case.dtypes[0]),
            ((case.channels, case.kernel), case.dtypes[0]),
            ((case.slots, case.channels, case.kernel), case.dtypes[1]),
        )
    )
    rest = dict.fromkeys(("bias", "present", "out", "gate_in", "gate_out", "new_lengths"), None)
    plan = causal_conv1d_plan(CausalConv1dParams(x=x, weight=weight, past=past, silu=True, **rest), multiprocessors=132)
    assert (plan.name, plan.tile_tokens) == (name, tile_tokens)
    of_thread = {"causal_conv1d": 8, "causal_conv1d_update": 4, "causal_conv1d_any": 1}[name]
    assert plan.blocks * plan.threads * of_thread >= case.channels > (plan.blocks - 1) * plan.threads * of_thread


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
    refused(place, causal_conv1d, given, error, text)


def test_other_things_that_do_not_fit(memory, stream):
    place = Place(memory, stream)
    given = fitting(place)
    refused(place, causal_conv1d, {**given, "out": given["x"]}, LayoutError, "out: expected a tensor of its own, got x itself.")
    refused(place, causal_conv1d, {**given, "gate_in": 3}, PlaceError, "gate_in: expected a DeviceTensor, got int.")
    refused(place, causal_conv1d, {**given, "stream": None}, PlaceError, "stream: expected ")
    numbers = place.tensor(np.zeros(96, np.float16)).allocation
    strided = DeviceTensor(numbers, shape=(2, 3, 8), dtype="float16", strides=(48, 16, 2))
    refused(place, causal_conv1d, {**given, "gate_out": strided}, LayoutError, "gate_out: expected a dense row for each token, got ")
    misplaced = DeviceTensor(numbers, shape=(2, 8, 4), dtype="float16", offset=2)
    refused(
        place, causal_conv1d, {**given, "past": misplaced}, LayoutError, "past: expected a dense tensor at a multiple of 16 bytes, got "
    )
    given["bias"].allocation.close()
    refused(place, causal_conv1d, given, KVCacheError, "bias: ")
