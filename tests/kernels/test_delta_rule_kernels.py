"""The gated delta rule against float64, over padding of any content, however tokens are split; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.delta_rule import CASES, Case, check, delta, make, run
from tests.kernels.recurrent import DTYPES, Place, check_parts, host_place, refused
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import DTypeError, KVCacheError, LayoutError, PlaceError, ShapeError
from trt_kvcache.kernels import gated_delta_rule
from trt_kvcache.kernels.attention_tiles import shared_limit
from trt_kvcache.kernels.delta_rule_kernels import DeltaRuleParams, delta_rule_plan


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


@pytest.mark.parametrize(
    ("case", "arch", "name"),
    [
        (Case(32, 128, 128), "sm_90", "delta_rule_update"),
        (Case(32, 128, 128, width=16), "sm_90", "delta_rule_scan"),
        (Case(32, 128, 128, width=17), "sm_90", "delta_rule_chunks_128_2"),
        (Case(48, 128, 128, width=17), "sm_90", "delta_rule_chunks_128_4"),
        (Case(48, 128, 128, width=17), "sm_80", "delta_rule_chunks_128_4"),
        (Case(32, 72, 128, width=500, slots=4, dtypes=("bfloat16", "bfloat16")), "sm_86", "delta_rule_chunks_128_4"),
        (Case(3, 64, 200, width=500), "sm_87", "delta_rule_chunks_64_2"),
        (Case(2, 64, 64, width=500, dtypes=("float32", "float32")), "sm_90", "delta_rule_scan"),
    ],
)
def test_which_kernel_runs(case, arch, name):
    place = host_place()
    arrays, _, past = make(case)
    given = {name: place.tensor(array) for name, array in arrays.items()}
    rest = dict.fromkeys(("decay", "present", "out", "dt_bias", "new_lengths"), None)
    plan = delta_rule_plan(DeltaRuleParams(**given, **rest, past=place.tensor(past)), arch, multiprocessors=132)
    assert plan.name == name
    assert plan.shared_nbytes <= shared_limit(arch)


@pytest.mark.parametrize("parts", [(1,) * 24, (1, 23), (16, 8), (17, 1, 6), (17, 7)])
def test_however_tokens_are_split(memory, stream, parts):
    case = Case(2, 24, 40, width=24, slots=2)
    arrays, parameters, past = make(case, seed=60)
    place, expected = Place(memory, stream), delta(arrays, parameters, past, [24, 24])
    check_parts(lambda piece, before: run(place, case, piece, parameters, before, None), arrays, past, parts, expected)


def fitting(place):
    """Arguments that fit: 4 heads of 24 over 2 key heads of 16, for 2 slots of 3 tokens."""

    zeros = place.zeros
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


@pytest.mark.parametrize(("name", "shape", "dtype", "error", "text"), REFUSED)
def test_what_does_not_fit(memory, stream, name, shape, dtype, error, text):
    place = Place(memory, stream)
    refused(place, gated_delta_rule, {**fitting(place), name: place.tensor(np.ones(shape, numpy_dtype(dtype)))}, error, text)


def test_other_things_that_do_not_fit(memory, stream):
    place = Place(memory, stream)
    given = fitting(place)
    refused(place, gated_delta_rule, {**given, "decay": None}, PlaceError, "decay: expected a DeviceTensor, got NoneType.")
    refused(place, gated_delta_rule, {**given, "stream": None}, PlaceError, "stream: expected ")
    misplaced = place.packed([np.zeros((2, 3, 2, 16), np.float16)], rows=37)[0]
    refused(place, gated_delta_rule, {**given, "k": misplaced}, LayoutError, "k: expected tokens at multiples of 16 bytes, got ")
    given["b"].allocation.close()
    refused(place, gated_delta_rule, given, KVCacheError, "b: ")
