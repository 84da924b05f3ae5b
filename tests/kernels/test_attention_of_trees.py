"""Attention of trees of draft tokens: against float64, over caches whose dead rows are NaN; chains; and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from tests.kernels.attention import QUANTIZED, TREE_CASES, Case, check, inputs, make_workspace, over_quantized, quantized
from tests.kernels.test_attention_kernels import FITTING, New, _check_refused
from tests.sweeps import each_once
from trt_kvcache.kernels import attend
from trt_kvcache.kernels.attention_tiles import PREFILL_VARIANTS, prefill_variant
from trt_kvcache.kernels.prefill_plan import plan_of


def choose(variant, monkeypatch):
    """Take this prefill kernel."""
    if variant != "planned":
        monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.decode_plan", lambda *_: None)
        monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.prefill_plan", lambda params: plan_of(params, variant))


@pytest.mark.parametrize("name", list(TREE_CASES))
@pytest.mark.parametrize("variant", ["planned", *PREFILL_VARIANTS])
def test_trees(memory, stream, name, variant, monkeypatch):
    case = TREE_CASES[name]
    appends = variant not in ("planned", "short", "wide", "whole")
    if appends and not memory.is_host and case.width > prefill_variant(case.head_dim, memory.arch, variant).tile_keys:
        return  # new tokens are in one tile
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    choose(variant, monkeypatch)
    check(case, memory, stream)


# Two pairs of each case: one of them, another one for each of four cases, and the other in slow tests.
_FAST = {(name, *QUANTIZED[(0, 1, 3, 2)[number % 4]]) for number, name in enumerate(TREE_CASES)}
_OVER_QUANTIZED = [case if case in _FAST else pytest.param(*case, marks=pytest.mark.slow) for case in over_quantized(TREE_CASES)]


@pytest.mark.parametrize(("name", "kv_dtype", "scales"), _OVER_QUANTIZED)
def test_trees_over_a_quantized_cache(memory, stream, name, kv_dtype, scales, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    check(quantized(TREE_CASES[name], kv_dtype, scales), memory, stream)


@pytest.mark.parametrize(("name", "variant"), each_once(TREE_CASES, PREFILL_VARIANTS))
def test_variants_over_a_quantized_cache(memory, stream, name, variant, monkeypatch):
    if memory.is_host:
        pytest.skip("the variants are those of the kernel")
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    choose(variant, monkeypatch)
    turn = list(TREE_CASES).index(name) + PREFILL_VARIANTS.index(variant)
    check(quantized(TREE_CASES[name], *QUANTIZED[turn % len(QUANTIZED)]), memory, stream)


@pytest.mark.parametrize("number", range(len(TREE_CASES)), ids=list(TREE_CASES))
def test_rows_that_an_earlier_layer_has_stored(memory, stream, number, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    case = dataclasses.replace(list(TREE_CASES.values())[number], shared=True)
    check(quantized(case, *QUANTIZED[number % 4]) if number % 3 == 2 else case, memory, stream)


def results(case, arrays, memory, stream):
    """Return the bytes of out, of the cache and of the scales after a call."""
    tensors = {name: memory.to_device(np.ascontiguousarray(array), stream=stream) for name, array in arrays.items()}
    out = memory.to_device(np.zeros_like(arrays["q"]), stream=stream)
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    with contextlib.closing(make_workspace(case, memory, stream)) as workspace:
        attend(**tensors, out=out, workspace=workspace, **options, stream=stream)
        memory.synchronize(stream)
    return [tensor.numpy().tobytes() for tensor in (out, tensors["cache"], *([tensors["kv_scales"]] if case.kv_dtype else []))]


CHAINS = [
    (Case(lengths=(37, 0), new=(5, 3), width=5, tree="chain", group=4, head_dim=128), "32"),
    (Case(lengths=(130, 3), new=(64, 33), width=64, tree="chain", tokens=200, group=2), "wide"),
    (quantized(Case(lengths=(130, 3), new=(9, 12), width=12, tree="chain", group=2), "int8", "token"), "64"),
]


@pytest.mark.parametrize(("case", "variant"), CHAINS, ids=["appends", "64 tokens", "quantized"])
def test_a_chain_gives_the_bits_of_a_call_without_ancestors(memory, stream, case, variant, monkeypatch):
    choose(variant, monkeypatch)  # with and without
    arrays = inputs(case)
    of_chain = results(case, arrays, memory, stream)
    assert of_chain == results(case, {name: array for name, array in arrays.items() if name != "ancestors"}, memory, stream)


@pytest.mark.parametrize("name", ["a few tokens", "as many tokens as a mask has bits"])
def test_bits_of_later_tokens_and_of_the_token_itself_have_no_effect(memory, stream, name):
    case = TREE_CASES[name]
    arrays = inputs(case)
    expected = results(case, arrays, memory, stream)
    own = np.uint64(1) << np.arange(case.width, dtype=np.uint64)
    masks = arrays["ancestors"].view(np.uint64)
    for others in (masks | ~(own - np.uint64(1)), masks & ~own):
        assert results(case, {**arrays, "ancestors": others.view(np.int64)}, memory, stream) == expected


REFUSED = [
    ("ancestors", New(2, 3, dtype="int32"), "DTypeError: ancestors: expected int64, got int32."),
    *[
        ("ancestors", New(*shape, dtype="int64", strides=strides), "ShapeError: ancestors: expected a dense tensor of shape (2, 3), got ")
        for shape, strides in (((3, 3), None), ((2, 4), None), ((2,), None), ((2, 3), (1, 2)))
    ],
    ("ancestors", 3, "PlaceError: ancestors: expected a DeviceTensor, got int."),
    ("ancestors", "closed", "ClosedError: ancestors: "),
    ("ancestors", "elsewhere", "PlaceError: ancestors: expected a tensor of "),
]
TREE_FITTING = {**FITTING, "ancestors": New(2, 3, dtype="int64", byte=1)}


@pytest.mark.parametrize(("argument", "wrong", "message"), REFUSED)
def test_refused(memory, stream, argument, wrong, message):
    _check_refused(TREE_FITTING, memory, stream, argument, wrong, message)


def test_more_tokens_than_a_mask_has_bits_are_refused(memory, stream):
    shapes = {"q": (2, 65, 4, 64), "k": (2, 65, 2, 64), "v": (2, 65, 2, 64), "cache": (2, 2, 2, 70, 64), "out": (2, 65, 4, 64)}
    wide = {**TREE_FITTING, **{name: New(*shape) for name, shape in shapes.items()}, "cos_sin": New(70, 2, 16, dtype="float32")}
    message = "ShapeError: ancestors: expected at most 64 new tokens, got 65."
    _check_refused(wide, memory, stream, "ancestors", New(2, 65, dtype="int64"), message)
