"""The state space of Mamba-2 against float64, over padding of any content, however tokens are split; and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.kernels.mamba2 import CASES, Case, check, make, run, scan
from tests.kernels.recurrent import DTYPES, Place, check_parts, host_place, refused
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, RangeError, ShapeError
from trt_kvcache.kernels import mamba2_scan
from trt_kvcache.kernels.attention_tiles import shared_limit
from trt_kvcache.kernels.mamba2_kernels import Mamba2Params, mamba2_plan


@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_states(memory, stream, name):
    check(Place(memory, stream), CASES[name])


@pytest.mark.parametrize("width", [1, 18])
@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_every_dtype(memory, stream, dtypes, width):
    check(Place(memory, stream), Case(2, 16, 32, width=width, slots=2, dtypes=dtypes), seed=30)


#: Published sizes of a head: heads, head dim, state size, groups.
PUBLISHED = {
    "mamba2": (24, 64, 128, 1),
    "codestral": (128, 64, 128, 8),
    "bamba": (128, 64, 128, 1),
    "granite": (48, 64, 128, 1),
    "nemotron": (128, 80, 128, 8),
    "falcon": (24, 64, 256, 1),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_step_of_published_sizes(memory, stream, name):
    heads, head_dim, state_size, groups = PUBLISHED[name]
    check(Place(memory, stream), Case(heads, head_dim, state_size, groups=groups, dtypes=("bfloat16", "float32")))


@pytest.mark.parametrize(
    ("case", "arch", "name"),
    [
        (Case(2, 64, 128), "sm_90", "mamba2_update"),
        (Case(2, 64, 128, width=16), "sm_90", "mamba2_scan"),
        (Case(2, 64, 128, width=17), "sm_90", "mamba2_chunks_128"),
        (Case(2, 64, 128, width=17), "sm_86", "mamba2_chunks_128"),
        (Case(2, 80, 64, width=500, dtypes=("bfloat16", "bfloat16")), "sm_87", "mamba2_chunks_64"),
        (Case(2, 64, 256, width=500), "sm_90", "mamba2_scan"),
        (Case(2, 64, 128, width=500, dtypes=("float32", "float32")), "sm_90", "mamba2_scan"),
    ],
)
def test_which_kernel_runs(case, arch, name):
    place = host_place()
    arrays, _, past = make(case)
    given = {name: place.tensor(array) for name, array in arrays.items()}
    rest = dict.fromkeys(("a", "present", "out", "d", "dt_bias", "new_lengths"), None)
    plan = mamba2_plan(Mamba2Params(**given, **rest, past=place.tensor(past), dt_limits=(0, 1)), arch)
    assert plan.name == name
    assert plan.shared_nbytes <= shared_limit(arch)


@pytest.mark.parametrize("parts", [(1,) * 24, (1, 23), (16, 8), (17, 1, 6)])
def test_however_tokens_are_split(memory, stream, parts):
    case = Case(2, 24, 40, width=24, slots=2)
    arrays, parameters, past = make(case, seed=60)
    place, expected = Place(memory, stream), scan(arrays, parameters, past, case.limits, [24, 24])
    check_parts(lambda piece, before: run(place, case, piece, parameters, before, None), arrays, past, parts, expected)


def fitting(place):
    """Arguments that fit: 4 heads of 8 and 2 groups of 16, for 2 slots of 3 tokens."""

    zeros = place.zeros
    return {
        "x": zeros(2, 3, 4, 8), "dt": zeros(2, 3, 4), "b": zeros(2, 3, 2, 16), "c": zeros(2, 3, 2, 16),
        "past": zeros(2, 4, 8, 16), "present": zeros(2, 4, 8, 16), "out": zeros(2, 3, 4, 8), "new_lengths": zeros(2, dtype=np.int32),
        "a": zeros(4, dtype=np.float32), "d": zeros(4, dtype=np.float32), "dt_bias": zeros(4, dtype=np.float32),
    }  # fmt: skip


REFUSED = [
    ("x", (2, 3, 32), "float16", ShapeError, r"x: expected a tensor \[B, s, heads, head_dim\], got "),
    ("x", (2, 3, 4, 12), "float16", ShapeError, "x: expected a head_dim that is a multiple of 8, got "),
    ("x", (2, 3, 4, 8), "int32", DTypeError, "x: expected one of float16, bfloat16, float32, got int32."),
    ("dt", (2, 3, 2), "float16", ShapeError, r"dt: expected shape \(2, 3, 4\), got "),
    ("dt", (2, 3, 4), "float32", DTypeError, "dt: expected float16, got float32."),
    ("b", (2, 3, 3, 16), "float16", ShapeError, r"b: expected a tensor \[2, 3, groups, state_size\] with groups a divisor of 4, got "),
    ("b", (2, 3, 2, 12), "float16", ShapeError, "b: expected a state_size that is a multiple of 8, up to 256, got "),
    ("b", (2, 3, 2, 264), "float16", ShapeError, "b: expected a state_size that is a multiple of 8, up to 256, got "),
    ("c", (2, 3, 4, 16), "float16", ShapeError, r"c: expected shape \(2, 3, 2, 16\), got "),
    ("past", (2, 4, 16, 8), "float16", ShapeError, r"past: expected shape \(2, 4, 8, 16\), got "),
    ("past", (2, 4, 8, 16), "bfloat16", DTypeError, "past: expected float16 or float32 for activations of float16, got bfloat16."),
    ("present", (2, 4, 8, 16), "float32", DTypeError, "present: expected float16, got float32."),
    ("out", (2, 3, 8, 4), "float16", ShapeError, r"out: expected shape \(2, 3, 4, 8\), got "),
    ("a", (4,), "float16", DTypeError, "a: expected float32, got float16."),
    ("d", (2,), "float32", ShapeError, r"d: expected shape \(4,\), got "),
    ("dt_bias", (4,), "float16", DTypeError, "dt_bias: expected float32, got float16."),
    ("new_lengths", (2,), "int64", DTypeError, "new_lengths: expected int32, got int64."),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "error", "text"), REFUSED)
def test_what_does_not_fit(memory, stream, name, shape, dtype, error, text):
    place = Place(memory, stream)
    refused(place, mamba2_scan, {**fitting(place), name: place.tensor(np.ones(shape, numpy_dtype(dtype)))}, error, text)


def test_other_things_that_do_not_fit(memory, stream):
    place = Place(memory, stream)
    given = fitting(place)
    for limits in ((-1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)):
        refused(place, mamba2_scan, {**given, "dt_limits": limits}, RangeError, "dt_limits: expected 0 <= smallest <= largest, got ")
    refused(place, mamba2_scan, {**given, "a": None}, PlaceError, "a: expected a DeviceTensor, got NoneType.")
    refused(place, mamba2_scan, {**given, "stream": None}, PlaceError, "stream: expected ")
    misplaced = place.packed([np.zeros((2, 3, 4, 8), np.float16)], rows=37)[0]
    refused(place, mamba2_scan, {**given, "x": misplaced}, LayoutError, "x: expected tokens at multiples of 16 bytes, got ")
    given["c"].allocation.close()
    refused(place, mamba2_scan, given, KVCacheError, "c: ")
