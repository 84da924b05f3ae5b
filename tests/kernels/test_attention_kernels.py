"""Attention of one new token per slot, and of several: against float64, over caches whose dead rows are NaN; and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.kernels.attention import (
    DECODE_CASES,
    FEW_CASES,
    GRID,
    PREFILL_CASES,
    QUANTIZED,
    check,
    over_quantized,
    quantized,
    random_prefill,
)
from tests.simt.standin import needs_standin
from tests.sweeps import each_once
from trt_kvcache import DeviceTensor, HostMemory
from trt_kvcache.errors import CudaError, KVCacheError, ShapeError
from trt_kvcache.kernels import AttentionWorkspace, attend, split_qkv
from trt_kvcache.kernels.attention_tiles import PREFILL_VARIANTS, prefill_variant
from trt_kvcache.kernels.prefill_plan import plan_of


@pytest.mark.parametrize("name", list(DECODE_CASES))
def test_decode(memory, stream, name, monkeypatch):
    if "parts" in name:
        monkeypatch.setattr(memory, "multiprocessor_count", 12, raising=False)
    check(DECODE_CASES[name], memory, stream)


@pytest.mark.parametrize(("arch", "programmatic"), [("sm_89", False), ("sm_90", True), ("sm_120", True)])
def test_how_decode_is_launched(memory, stream, monkeypatch, arch, programmatic):
    launched = []
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.launch", lambda *_, **options: launched.append(options))
    monkeypatch.setattr(memory, "arch", arch, raising=False)
    with contextlib.suppress(AssertionError):  # nothing was computed
        check(DECODE_CASES["many parts"], memory, stream)
    assert [(one["cooperative"], one["programmatic_dependent_launch"]) for one in launched] == [(True, programmatic)] * (not memory.is_host)


@needs_standin
def test_more_blocks_than_can_run_together(memory, stream, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 13)
    with pytest.raises(CudaError, match=r"^attention_decode_8 could not be launched on cuda:0: .*13.* exceeds the limit"):
        check(dataclasses.replace(DECODE_CASES["many parts"], lengths=(4000,), tokens=4001), memory, stream)


@pytest.mark.parametrize("multiprocessors", [3, 12])
@pytest.mark.parametrize("name", list(FEW_CASES))
def test_few(memory, stream, name, multiprocessors, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", multiprocessors, raising=False)
    monkeypatch.delattr("trt_kvcache.kernels.attention_kernels.prefill_plan")  # it is not asked
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.prefers_row_blocks", lambda _: False)
    check(FEW_CASES[name], memory, stream)


@pytest.mark.parametrize("name", list(PREFILL_CASES))
@pytest.mark.parametrize("variant", ["planned", *PREFILL_VARIANTS])
def test_prefill(memory, stream, name, variant, monkeypatch):
    case = PREFILL_CASES[name]
    appends = variant not in ("planned", "short", "wide", "whole")
    if appends and not memory.is_host and case.width > prefill_variant(case.head_dim, memory.arch, variant).tile_keys:
        return  # new tokens are in one tile
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    if variant != "planned":
        monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.decode_plan", lambda *_: None)
        monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.prefill_plan", lambda params: plan_of(params, variant))
    check(case, memory, stream)


@needs_standin
def test_parts_that_several_lanes_put_together(memory, stream, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 12)  # eleven tiles of keys, in a block each
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.decode_plan", lambda *_: None)
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.prefill_plan", lambda params: plan_of(params, "16"))
    check(PREFILL_CASES["some keys for each part"], memory, stream)


@pytest.mark.parametrize(("seed", "multiprocessors"), each_once(range(20), [2, 6]))
def test_random_prefill(memory, stream, seed, multiprocessors, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", multiprocessors, raising=False)
    check(random_prefill(seed), memory, stream, seed)


@pytest.mark.parametrize(("name", "kv_dtype", "scales"), over_quantized(DECODE_CASES))
def test_quantized_decode(memory, stream, name, kv_dtype, scales, monkeypatch):
    if "parts" in name:
        monkeypatch.setattr(memory, "multiprocessor_count", 12, raising=False)
    check(quantized(DECODE_CASES[name], kv_dtype, scales), memory, stream)


@pytest.mark.parametrize(("name", "kv_dtype", "scales"), over_quantized(FEW_CASES))
def test_quantized_few(memory, stream, name, kv_dtype, scales, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 12, raising=False)
    check(quantized(FEW_CASES[name], kv_dtype, scales), memory, stream)


@pytest.mark.parametrize(("name", "kv_dtype", "scales"), over_quantized(PREFILL_CASES))
def test_quantized_prefill(memory, stream, name, kv_dtype, scales, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    check(quantized(PREFILL_CASES[name], kv_dtype, scales), memory, stream)


def check_quantized_variant(name, variant, memory, stream, monkeypatch):
    if memory.is_host:
        pytest.skip("the variants are those of the kernel")
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.decode_plan", lambda *_: None)
    monkeypatch.setattr("trt_kvcache.kernels.attention_kernels.prefill_plan", lambda params: plan_of(params, variant))
    turn = list(PREFILL_CASES).index(name) + PREFILL_VARIANTS.index(variant)  # each variant has all kinds of caches
    check(quantized(PREFILL_CASES[name], *QUANTIZED[turn % len(QUANTIZED)]), memory, stream)


@pytest.mark.parametrize(("name", "variant"), each_once(PREFILL_CASES, PREFILL_VARIANTS))
def test_quantized_prefill_variants(memory, stream, name, variant, monkeypatch):
    check_quantized_variant(name, variant, memory, stream, monkeypatch)


def test_output_that_is_scaled_after_the_next_scores(memory, stream, monkeypatch):
    check_quantized_variant("large scores", "64", memory, stream, monkeypatch)


ALL_CASES = [case for cases in (DECODE_CASES, FEW_CASES, PREFILL_CASES) for case in cases.items()]


@pytest.mark.parametrize("number", range(len(ALL_CASES)), ids=[name for name, _ in ALL_CASES])
def test_rows_that_an_earlier_layer_has_stored(memory, stream, number, monkeypatch):
    monkeypatch.setattr(memory, "multiprocessor_count", 6, raising=False)
    case = dataclasses.replace(ALL_CASES[number][1], shared=True)
    kind = number % 6  # a third over a quantized cache, of each kind
    check(quantized(case, *QUANTIZED[number % 4]) if kind in (2, 5) else case, memory, stream)


@pytest.mark.parametrize("kv", [("k", None), (None, "v")])
def test_only_one_of_k_and_v(memory, stream, kv):
    given = {name: New(2, 3, 2, 64).on(memory) if name in kv else None for name in "kv"}
    others = {name: tensor.on(memory) for name, tensor in FITTING.items() if name not in "kv"}
    with raises(ShapeError, "k, v", expected="two tensors, or None for both", got="None"):
        attend(**given, **others, stream=stream)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GRID))
def test_grid(memory, stream, name):
    check(GRID[name], memory, stream)


class New:
    """A tensor of this shape, of equal bytes; float16 where it is not said."""

    def __init__(self, *shape, dtype="float16", strides=None, byte=0):
        self.shape, self.dtype, self.strides, self.byte = shape, dtype, strides, byte

    def on(self, memory):
        whole = memory.to_device(np.full(8 * np.prod(self.shape), self.byte, np.uint8), stream=memory.create_stream())
        return DeviceTensor(whole.allocation, shape=self.shape, dtype=self.dtype, strides=self.strides)


class Made:
    """A workspace for so many heads over 2."""

    def __init__(self, heads):
        self.heads = heads

    def on(self, memory):
        return AttentionWorkspace(memory, num_heads=self.heads, num_kv_heads=2, head_dim=64, stream=memory.create_stream())


FITTING = {
    "q": New(2, 3, 4, 64, byte=60),
    "k": New(2, 3, 2, 64, byte=60),
    "v": New(2, 3, 2, 64, byte=60),
    "cache": New(2, 2, 2, 5, 64),
    "lengths": New(2, dtype="int32"),
    "out": New(2, 3, 4, 64),
    "workspace": Made(4),
    "new_lengths": New(2, dtype="int32", byte=60),
    "cos_sin": New(5, 2, 16, dtype="float32"),
    "sinks": New(4, dtype="float32"),
}
Q = "ShapeError: q: expected [2, 1 to 5, 2 times 1 to 16, 64], got "
ANGLES = "ShapeError: cos_sin: expected a dense tensor [5 or more, 2, rotary_dim / 2], of an even size, got "

# Argument, what is wrong with it, how the message starts.
REFUSED = [
    ("cache", New(2, 2, 5, 64), "ShapeError: cache: expected a tensor [B, 2, H, S, D], got "),
    (
        "cache",
        New(2, 2, 2, 5, 64, dtype="float32"),
        "DTypeError: cache: expected one of float16, bfloat16, float8_e4m3fn, int8, got float32.",
    ),
    ("cache", New(2, 2, 2, 5, 72), "ShapeError: cache: expected head_dim one of (64, 80, 96, 128, 256, 512), got "),
    *[("q", New(*shape), Q) for shape in ((2, 3, 64), (2, 3, 3, 64), (2, 3, 34, 64), (2, 6, 4, 64), (2, 0, 4, 64))],
    ("q", New(3, 3, 4, 64), "ShapeError: q: expected shape (2, 3, 4, 64), got "),
    ("q", New(2, 3, 4, 80), "ShapeError: q: expected shape (2, 3, 4, 64), got "),
    ("q", New(2, 3, 4, 64, dtype="bfloat16"), "DTypeError: q: expected float16 as the cache, got bfloat16."),
    ("out", New(2, 3, 2, 64), "ShapeError: out: expected shape (2, 3, 4, 64), got "),
    ("out", New(2, 3, 4, 64, strides=(1024, 256, 64, 1)), "LayoutError: out: expected a dense tensor, got "),
    ("cos_sin", New(5, 2, 16), "DTypeError: cos_sin: expected float32, got float16."),
    *[("cos_sin", New(*shape, dtype="float32"), ANGLES) for shape in ((4, 2, 16), (5, 3, 16), (5, 2, 15), (5, 2, 34), (5, 32))],
    *[("scale", one, f"RangeError: scale: expected 1e-06 to 1000000.0, got {one}.") for one in (0.0, 9e-7, -1.0, 1.1e6, np.nan)],
    *[("softcap", one, f"RangeError: softcap: expected 0, or 1e-06 to 1000000.0, got {one}.") for one in (9e-7, -1.0, 1.1e6, np.nan)],
    ("sinks", New(4), "DTypeError: sinks: expected float32, got float16."),
    *[
        ("sinks", New(*shape, dtype="float32"), "ShapeError: sinks: expected a dense tensor of shape (4,), got ")
        for shape in ((2,), (1, 4))
    ],
    ("sinks", New(4, dtype="float32", strides=(2,)), "ShapeError: sinks: expected a dense tensor of shape (4,), got "),
    ("window", -1, "RangeError: window: expected at least 0, got -1."),
    ("window", 0.5, "RangeError: window: expected an integer, got 0.5."),
    ("workspace", Made(2), "ShapeError: workspace: expected one made for 4 over 2 heads of 64, got less."),
    ("workspace", "elsewhere", "PlaceError: workspace: expected one of "),
    ("workspace", "closed", "ClosedError: workspace: "),
    ("stream", None, "PlaceError: stream: expected "),
]
for name in ("k", "v"):
    REFUSED += [
        (name, New(2, 3, 4, 64), f"ShapeError: {name}: expected shape (2, 3, 2, 64), got "),
        (name, New(2, 3, 2, 64, dtype="float32"), f"DTypeError: {name}: expected float16 as the cache, got float32."),
        (name, New(2, 3, 2, 64, strides=(768, 256, 128, 1)), f"LayoutError: {name}: expected dense heads of each token, got "),
        (name, New(2, 3, 2, 64, strides=(396, 132, 64, 1)), f"LayoutError: {name}: expected tokens at multiples of 16 bytes, got "),
    ]
for name in ("lengths", "new_lengths"):
    REFUSED += [
        (name, New(2, dtype="int64"), f"DTypeError: {name}: expected int32, got int64."),
        (name, New(3, dtype="int32"), f"ShapeError: {name}: expected a dense tensor of shape (2,), got "),
        (name, New(2, dtype="int32", strides=(2,)), f"ShapeError: {name}: expected a dense tensor of shape (2,), got "),
    ]
for name in FITTING.keys() - {"workspace"}:
    REFUSED += [(name, 3, f"PlaceError: {name}: expected a DeviceTensor, got int."), (name, "closed", f"ClosedError: {name}: ")]
    REFUSED += [(name, "elsewhere", f"PlaceError: {name}: expected a tensor of ")] if name != "cache" else []


@pytest.mark.parametrize(("argument", "wrong", "message"), sorted(REFUSED, key=lambda one: (one[0], one[2])))
def test_refused(memory, stream, argument, wrong, message):
    _check_refused(FITTING, memory, stream, argument, wrong, message)


#: The same over a quantized cache.
QUANTIZED_FITTING = {**FITTING, "cache": New(2, 2, 2, 5, 64, dtype="int8"), "kv_scales": New(2, 2, 2, 8, dtype="float32")}
SCALES = "kv_scales: expected [2, 2] or [2, 2, 2, 5 or more, a multiple of 4], got "
QUANTIZED_REFUSED = [
    ("q", New(2, 3, 4, 64, dtype="float32"), "DTypeError: q: expected one of float16, bfloat16, got float32."),
    *[(name, New(2, 3, 2, 64, dtype="bfloat16"), f"DTypeError: {name}: expected float16 as q, got bfloat16.") for name in "kv"],
    ("out", New(2, 3, 4, 64, dtype="int8"), "DTypeError: out: expected float16 as q, got int8."),
    ("cache", New(2, 2, 2, 5, 64), "DTypeError: kv_scales: expected None with a cache of float16, got "),
    (
        "kv_scales",
        None,
        "DTypeError: kv_scales: expected a tensor [2, 2] or [2, 2, 2, 5 or more, a multiple of 4] with a cache of int8, got",
    ),
    ("kv_scales", 3, "PlaceError: kv_scales: expected a DeviceTensor, got int."),
    ("kv_scales", "closed", "ClosedError: kv_scales: "),
    ("kv_scales", "elsewhere", "PlaceError: kv_scales: expected a tensor of "),
    ("kv_scales", New(2, 2), "DTypeError: kv_scales: expected float32, got float16."),
    ("kv_scales", New(2, 2, dtype="float32", strides=(4, 1)), "LayoutError: kv_scales: expected a dense tensor, got "),
    *[
        ("kv_scales", New(*shape, dtype="float32"), f"ShapeError: {SCALES}")
        for shape in ((2, 3), (2, 2, 2, 4), (2, 2, 2, 7), (3, 2, 2, 8), (2, 1, 2, 8), (2, 2, 1, 8), (2, 2, 2, 8, 1))
    ],
    *[
        ("kv_scales", New(2, 2, 2, 8, dtype="float32", strides=strides), f"LayoutError: kv_scales: {rule}")
        for strides, rule in (
            ((64, 32, 16, 2), "expected dense heads"),
            ((64, 32, 12, 1), "expected dense heads"),
            ((36, 18, 8, 1), "expected slots, K and V at multiples of 16 bytes"),
            ((16, 16, 8, 1), "slots, or K and V, overlap"),
        )
    ],
]


@pytest.mark.parametrize(("argument", "wrong", "message"), QUANTIZED_REFUSED)
def test_refused_of_a_quantized_cache(memory, stream, argument, wrong, message):
    _check_refused(QUANTIZED_FITTING, memory, stream, argument, wrong, message)


def _check_refused(fitting, memory, stream, argument, wrong, message):
    given = {name: new.on(memory) for name, new in fitting.items()}
    if wrong == "closed":
        (given[argument] if argument == "workspace" else given[argument].allocation).close()
    else:
        elsewhere = HostMemory() if wrong == "elsewhere" else memory
        wrong = fitting[argument] if wrong == "elsewhere" else wrong
        given[argument] = wrong.on(elsewhere) if hasattr(wrong, "on") else wrong
    # Zeros in the cache and in out: whatever a call writes shows.
    left = [one for one in given.values() if isinstance(one, DeviceTensor) and not one.allocation.closed]
    before = [one.numpy().tobytes() for one in left]
    with pytest.raises(KVCacheError) as caught:
        attend(**{"stream": stream, **given})
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
    assert [one.numpy().tobytes() for one in left] == before


def test_what_is_not_packed(memory):
    with raises(KVCacheError, "qkv", expected="tensor [B, s, 8, D]"):
        split_qkv(New(2, 3, 7, 64).on(memory), 4, 2)


@pytest.mark.parametrize("others", [40.0, np.nan])
@pytest.mark.parametrize(("width", "few", "all_heads"), [(1, 3, 8), (1, 9, 16), (2, 9, 16), (2, 5, 8)])
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_query_head_depends_on_no_other_one(memory, stream, kv_dtype, width, few, all_heads, others, monkeypatch):
    """Nor on what lies in shared memory where there is none: otherwise the same step would give other bits next time."""
    monkeypatch.setattr(memory, "multiprocessor_count", 1, raising=False)  # so that a warp has several tiles
    random, tokens, dim = np.random.default_rng(0), 2500, 64
    growth = np.linspace(0.2, 3, tokens)[:, None]  # so that maxima rise, in other tiles for each head
    keys, values = random.standard_normal((2, tokens, dim)) * growth
    q = random.standard_normal((1, width, all_heads, dim)).astype(np.float16)
    q[:, :, few:] *= np.float16(others)
    k, v = random.standard_normal((2, 1, width, 1, dim)).astype(np.float16)
    is_quantized = kv_dtype == "int8"
    stored = np.stack([keys, values])[None, :, None] * (20 if is_quantized else 1)
    results = []
    for heads in (few, all_heads):
        options = {"kv_scales": memory.to_device(np.full((2, 1), 0.05, np.float32), stream=stream)} if is_quantized else {}
        cache = memory.to_device(
            np.rint(stored).clip(-127, 127).astype(np.int8) if is_quantized else stored.astype(np.float16), stream=stream
        )
        given, new_k, new_v, lengths = (
            memory.to_device(np.ascontiguousarray(part), stream=stream)
            for part in (q[:, :, :heads], k, v, np.array([tokens - width], np.int32))
        )
        out = memory.to_device(np.zeros((1, width, heads, dim), np.float16), stream=stream)
        with contextlib.closing(AttentionWorkspace(memory, num_heads=heads, num_kv_heads=1, head_dim=dim, stream=stream)) as workspace:
            attend(given, new_k, new_v, cache, lengths, out=out, workspace=workspace, stream=stream, **options)
            memory.synchronize(stream)
        results.append(out.numpy()[:, :, :few])
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)
