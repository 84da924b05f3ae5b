"""The short convolution against float64, over padding and states of any content, however tokens are split; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.recurrent import DTYPES, TOLERANCE, Place, check_slots, counts_of, random_array
from trt_kvcache import DeviceTensor
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import causal_conv1d


@dataclass(frozen=True)
class Case:
    channels: int
    width: int
    kernel: int = 4
    slots: int = 1
    new: tuple[int, ...] | None = None
    dtypes: tuple[str, str] = ("float16", "float16")
    bias: bool = False
    silu: bool = False
    gates: bool = False
    in_place: bool = True
    rows: int | None = None  # elements of a row of the tensor that x is a part of


CASES = {
    "one token": Case(8, 1),
    "one token of some slots": Case(24, 1, slots=4, new=(1, 0, 3, -1), bias=True, silu=True, in_place=False),
    "Mamba-2": Case(72, 21, slots=3, new=(21, 0, 2), bias=True, silu=True, dtypes=("bfloat16", "float32")),
    "Qwen3-Next": Case(40, 17, slots=2, silu=True, dtypes=("bfloat16", "bfloat16"), rows=64),
    "LFM2": Case(48, 18, kernel=3, slots=3, new=(18, 1, 16), gates=True, dtypes=("bfloat16", "bfloat16"), in_place=False),
    "LFM2, a step": Case(48, 1, kernel=3, slots=3, bias=True, gates=True),
    "two inputs": Case(16, 35, kernel=2, slots=2, new=(35, 33), bias=True),
    "channels that are no vectors": Case(7, 34, slots=3, new=(17, 34, 3), bias=True, silu=True, gates=True),
    "rows that are no vectors": Case(8, 5, slots=2, rows=13, in_place=False),
    "rows that are no vectors, wide": Case(16, 19, slots=2, rows=21, silu=True, dtypes=("float32", "float32")),
    "several blocks": Case(1100, 3, slots=2, new=(2, 3)),
    "a tile and what is before it": Case(4, 49, slots=4, new=(47, 48, 49, 16), dtypes=("float32", "float32"), bias=True),
}


def convolve(x, weight, bias, past, silu, gate_in, gate_out, counts):
    """Return outputs and states in float64, token by token, from the same rounded inputs."""
    out, state = np.zeros(x.shape), past.astype(np.float64)
    for slot, count in enumerate(counts):
        for token in range(count):
            entering = x[slot, token] if gate_in is None else (x[slot, token].astype(np.float32) * gate_in[slot, token].astype(np.float32))
            state[slot] = np.concatenate([state[slot][:, 1:], entering.astype(x.dtype).astype(np.float64)[:, None]], axis=1)
            total = (state[slot] * weight.astype(np.float64)).sum(axis=1) + (0 if bias is None else bias.astype(np.float64))
            total = total / (1 + np.exp(-total)) if silu else total
            out[slot, token] = total if gate_out is None else total * gate_out[slot, token].astype(np.float64)
    return out, state


def make(case, seed=0):
    dtype, state = case.dtypes
    shape = (case.slots, case.width, case.channels)
    arrays = {"x": random_array(seed, shape, dtype)}
    if case.gates:
        arrays |= {"gate_in": random_array(seed + 1, shape, dtype), "gate_out": random_array(seed + 2, shape, dtype)}
    weight, bias = random_array(seed + 3, (case.channels, case.kernel), dtype), random_array(seed + 4, case.channels, dtype)
    past = random_array(seed + 5, (case.slots, case.channels, case.kernel), dtype).astype(numpy_dtype(state))
    return arrays, weight, bias if case.bias else None, past


def run(place, case, arrays, weight, bias, past, new):
    """Run the call; return outputs and the present state."""
    tensors = dict(zip(arrays, place.packed(list(arrays.values()), case.rows), strict=True))
    before = place.tensor(past)
    present = before if case.in_place else place.empty(past.shape, case.dtypes[1])
    out = place.empty(arrays["x"].shape, case.dtypes[0])
    options = {"bias": None if bias is None else place.tensor(bias), "silu": case.silu, **tensors}
    if new is not None:
        options["new_lengths"] = place.tensor(np.array(new, np.int32))
    causal_conv1d(options.pop("x"), place.tensor(weight), before, present=present, out=out, **options, stream=place.stream)
    place.memory.synchronize(place.stream)
    if not case.in_place:
        assert before.numpy().tobytes() == past.tobytes()
    return out.numpy(), present.numpy()


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_states(memory, stream, name):
    case = CASES[name]
    arrays, weight, bias, past = make(case)
    counts = counts_of(case.new, case.slots, case.width)
    wanted = convolve(arrays["x"], weight, bias, past, case.silu, arrays.get("gate_in"), arrays.get("gate_out"), counts)
    for slot, count in enumerate(counts):
        for array in arrays.values():
            array[slot, count:] = np.nan
    past[[slot for slot, count in enumerate(counts) if count == 0]] = np.nan  # is kept, and nothing else
    out, state = run(Place(memory, stream), case, arrays, weight, bias, past, case.new)
    check_slots(out, wanted[0], TOLERANCE[case.dtypes[0]])
    for slot, count in enumerate(counts):
        assert not out[slot, count:].any()
        assert state[slot].tobytes() == (wanted[1][slot].astype(past.dtype) if count else past[slot]).tobytes()


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_dtype(memory, stream, dtypes):
    case = Case(32, 5, slots=2, bias=True, silu=True, gates=True, dtypes=dtypes)
    arrays, weight, bias, past = make(case, seed=20)
    out, state = run(Place(memory, stream), case, arrays, weight, bias, past, None)
    wanted = convolve(arrays["x"], weight, bias, past, True, arrays["gate_in"], arrays["gate_out"], [5, 5])
    check_slots(out, wanted[0], TOLERANCE[dtypes[0]])
    assert state.tobytes() == wanted[1].astype(past.dtype).tobytes()


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
