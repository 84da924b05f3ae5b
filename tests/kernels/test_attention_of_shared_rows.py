"""Decode steps of layers that read the K and V of an earlier layer: the kernels, and their results beside those of other kernels."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from tests.kernels.attention import DECODE_CASES, FEW_CASES, QUANTIZED, TOLERANCE, check, inputs, make_workspace, quantized
from trt_kvcache.kernels import attend
from trt_kvcache.kernels.attention_tiles import DECODE_HEAD_DIMS

LAUNCHES = "trt_kvcache.kernels.attention_kernels"

CASES = [
    (f"{case.width} {name}", case)
    for cases in (DECODE_CASES, FEW_CASES)
    for name, case in cases.items()
    if case.head_dim in DECODE_HEAD_DIMS
]


def attend_twice(case, memory, stream, between=lambda: None):
    """Call with k and v, and then as a later layer does. Return ``out``, the cache and the scales of each."""
    arrays = inputs(case)
    tensors = {name: memory.to_device(np.ascontiguousarray(array), stream=stream) for name, array in arrays.items()}
    options, found = {"scale": case.scale, "window": case.window, "softcap": case.softcap}, []
    with contextlib.closing(make_workspace(case, memory, stream)) as workspace:
        for new in ({}, {"k": None, "v": None}):
            out = memory.to_device(np.full_like(arrays["q"], np.nan), stream=stream)
            attend(**{**tensors, **new}, out=out, workspace=workspace, **options, stream=stream)
            stored = [memory.to_device(tensors[name].numpy(), stream=stream) for name in ("cache", "kv_scales") if name in tensors]
            found.append((out, *stored))
            between()
            workspace.plans.clear()
        memory.synchronize(stream)
    return [[tensor.numpy() for tensor in one] for one in found]


@pytest.mark.parametrize("stores", ["16 bits", "8 bits"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _ in CASES])
def test_the_bits_of_the_layer_that_appends(memory, stream, number, stores, monkeypatch):
    """A later layer reads from the cache what the decode kernel of the other one has computed, and leaves it as it is."""
    monkeypatch.setattr(memory, "multiprocessor_count", 12, raising=False)
    monkeypatch.delattr(f"{LAUNCHES}.prefill_plan")  # it is not asked
    monkeypatch.setattr(f"{LAUNCHES}.prefers_row_blocks", lambda _: False)
    case = CASES[number][1]
    appending, reading = attend_twice(quantized(case, *QUANTIZED[number % 4]) if stores == "8 bits" else case, memory, stream)
    for one, other in zip(appending, reading, strict=True):
        assert np.array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("kind", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("name", ["sixteen", "window of large heads", "softcap and scale", "sinks of many parts"])
def test_the_result_of_a_prefill_kernel(memory, stream, name, kind, monkeypatch):
    case = DECODE_CASES[name] if kind is None else quantized(DECODE_CASES[name], *kind)
    (decoded, *_), (expected, *_) = attend_twice(
        case, memory, stream, lambda: monkeypatch.setattr(f"{LAUNCHES}.decode_plan", lambda *_: None)
    )
    error = np.abs(decoded.astype(np.float64) - expected.astype(np.float64)).max()
    assert error <= 2 * TOLERANCE[case.dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "source", "kernel"),
    [
        (DECODE_CASES["groups"], "attention_decode-float16-128-shared", "attention_decode_8"),
        (quantized(DECODE_CASES["groups"], "int8", "token"), "attention_decode-float16-128-int8-shared", "attention_decode_8"),
        (FEW_CASES["two"], "attention_decode_few-float16-128-shared", "attention_decode_few_8"),
        (DECODE_CASES["many parts of heads of 512"], "attention_prefill-float16-512", "attention_prefill_short"),
    ],
)
def test_kernels(memory, stream, case, source, kernel, monkeypatch):
    launched = []
    monkeypatch.setattr(f"{LAUNCHES}.launch", lambda _, source, name, *rest, **options: launched.append((source, name)))
    with contextlib.suppress(AssertionError):  # nothing was computed
        check(dataclasses.replace(case, shared=True), memory, stream)
    assert launched == [] if memory.is_host else [(source, kernel)]
