from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from tests.helpers.assertions import assert_close
from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, ClosedError, ConfigError, EngineError, LayoutError, PlaceError, RangeError
from trt_kvcache.kernels.token_tree import MAX_TREE_TOKENS
from trt_kvcache.reference import ReferenceEngine

from .rig import DECODE, GOLDEN, PREFILL, Rig, random_ids

MODEL = "llama-llama3-bias"
VOCAB, HEADS, HEAD_DIM = 67, 2, 16
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])

equal = np.testing.assert_array_equal

# Finite in every dtype, and large beside any key or value of the models.
LARGE = 1e4


# --- what it is ---


def test_tensors_are_those_of_the_tensorrt_engine() -> None:
    rig = Rig(MODEL, length=29, dtype="float16")
    shape = (-1, HEADS, 29, HEAD_DIM)
    specs = [
        TensorSpec(name="input_ids", shape=(-1, -1), dtype="int32", mode=TensorMode.INPUT),
        TensorSpec(name="kvcache_start_index", shape=(-1,), dtype="int32", mode=TensorMode.INPUT),
        TensorSpec(name="last_token_ids", shape=(-1, 1), dtype="int32", mode=TensorMode.INPUT),
        TensorSpec(name="logits", shape=(-1, VOCAB), dtype="float32", mode=TensorMode.OUTPUT),
    ]
    for layer in (0, 1):
        for kind in ("k", "v"):
            name = f"{kind}_cache_{layer}"
            specs.append(TensorSpec(name=name, shape=shape, dtype="float16", mode=TensorMode.INPUT))
            specs.append(TensorSpec(name=f"present_{name}", shape=shape, dtype="float16", mode=TensorMode.OUTPUT, alias=name))
    assert dict(rig.engine.tensors) == {spec.name: spec for spec in specs}
    modes = [spec.mode for spec in rig.engine.tensors.values()]
    assert modes == sorted(modes, key=lambda mode: mode is TensorMode.OUTPUT)
    assert rig.engine.memory is rig.memory


def test_profiles() -> None:
    prefill, decode = Rig(MODEL, batch=3, width=24).engine.profiles
    assert (prefill.name, prefill.min_batch, prefill.max_batch, prefill.min_width, prefill.max_width) == ("prefill", 1, 3, 1, 24)
    assert (decode.name, decode.min_batch, decode.max_batch, decode.min_width, decode.max_width) == ("decode", 1, 3, 1, 1)


# --- what a step writes ---


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@DTYPES
def test_a_step_writes_its_rows_and_no_other_byte(dtype, attention):
    rig = Rig(MODEL, batch=4, length=11, width=5, dtype=dtype, attention=attention)
    rig.poison(LARGE)
    starts = [0, 7, 4]
    before = [array.copy() for array in rig.caches()]
    rig.step(random_ids(VOCAB, 3, 5), starts, [1, 4, 2])
    for old, new in zip(before, rig.caches(), strict=True):
        written = np.zeros(old.shape, bool)
        for slot, start in enumerate(starts):
            written[slot, :, start : start + 5] = True  # slot 1 would end at row 12 of 11: that row is dropped
        assert (old.view(np.uint8) == new.view(np.uint8)).reshape(*old.shape, -1).all(axis=-1)[~written].all()
        assert (np.abs(new[written].astype(np.float32)) < 100).all()


def test_padding_rows_are_written_as_the_native_layer_does() -> None:
    """What a slot's padding leaves in the cache are the rows of the padding tokens, not nothing."""
    padded, alone = Rig(MODEL), Rig(MODEL)
    ids = random_ids(VOCAB, 2, 6)
    padded.step(ids, [3, 0], [1, 5])
    alone.step(ids[:1], [3], [5])
    for with_neighbour, expected in zip(padded.caches(), alone.caches(), strict=True):
        assert_close(with_neighbour[0, :, 3:9], expected[0, :, 3:9])
        assert np.abs(expected[0, :, 5:9]).min(axis=-1).all()


def test_weights_are_rounded_to_the_dtype_of_the_cache(tmp_path: Path) -> None:
    """A checkpoint whose float32 weights bfloat16 can hold gives the same logits as the one that it was rounded from."""
    rounded = shutil.copytree(GOLDEN / "llama", tmp_path / "rounded")
    tensors = load_file(rounded / "model.safetensors")
    save_file({name: array.astype(bfloat16).astype(np.float32) for name, array in tensors.items()}, rounded / "model.safetensors")
    ids, widths = random_ids(61, 9), [8, 1]
    logits = Rig(rounded, dtype="bfloat16").run(ids, widths)
    np.testing.assert_array_equal(logits, Rig("llama", dtype="bfloat16").run(ids, widths))
    assert np.abs(logits - Rig("llama").run(ids, widths)).max() > 1e-3


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_a_call_can_begin_at_any_slot(attention):
    """Views that start at slot 2 of the cache; H * S * D * 4 bytes is a multiple of 256 here."""
    whole, part = (Rig(MODEL, length=8, width=5, attention=attention) for _ in range(2))
    ids = random_ids(VOCAB, 1, 5)
    want = whole.step(ids, [0])
    part.poison(LARGE)
    part.prepare(ids, [0])
    for name, view in part.bindings():
        part.engine.bind(name, view[2:3])
    runs(part, want)
    for written, reference in zip(part.caches(), whole.caches(), strict=True):
        equal(written[2, :, :5], reference[0, :, :5])
        assert (written[:2] == LARGE).all()


# --- what a step reads ---


@pytest.mark.parametrize(
    ("attention", "dead"),
    [(which, value) for which in ("native", "plugin") for value in (np.nan, np.inf, LARGE)] + [("mask", LARGE), ("mask", -LARGE)],
)
@DTYPES
def test_dead_rows_change_no_bit(attention, dead, dtype):
    ids, widths = random_ids(VOCAB, 17), [7, 1, 8, 1]
    clean, poisoned = (Rig(MODEL, dtype=dtype, attention=attention) for _ in range(2))
    poisoned.poison(dead)
    equal(poisoned.run(ids, widths), clean.run(ids, widths))


def test_live_rows_are_read_from_the_bound_memory() -> None:
    """Not from a copy inside the engine."""
    ids = random_ids(VOCAB, 9)
    rig = Rig(MODEL)
    before = rig.run(ids, [8, 1])[-1]
    rig.caches()[1][0, 0, 4] += 1.0
    assert np.abs(rig.step(ids[8:], [8]) - before).max() > 1e-3


def test_two_variants_agree() -> None:
    ids, widths = random_ids(VOCAB, 20), [12, 1, 6, 1]
    native, mask = Rig(MODEL, attention="native"), Rig(MODEL, attention="mask")
    assert_close(mask.run(ids, widths), native.run(ids, widths))


def test_a_larger_capacity_changes_nothing() -> None:
    ids, widths = random_ids(VOCAB, 20), [12, 1, 6, 1]
    np.testing.assert_array_equal(Rig(MODEL, length=29).run(ids, widths), Rig(MODEL, length=83).run(ids, widths))


def test_a_ragged_batch_equals_each_row_alone() -> None:
    """Right-padded prefill of 3, 9 and 5 tokens, then two decode steps."""
    prompts = [random_ids(VOCAB, size, seed=size) for size in (3, 9, 5)]
    following = random_ids(VOCAB, 2, 3)
    padded = np.stack([np.pad(prompt, (0, 9 - len(prompt))) for prompt in prompts])
    rig = Rig(MODEL)
    lengths = np.array([3, 9, 5])
    batched = [rig.step(padded, [0, 0, 0], lengths - 1)]
    for step, tokens in enumerate(following):
        batched.append(rig.step(tokens[:, None], lengths + step, profile=DECODE))
    for slot, prompt in enumerate(prompts):
        alone = Rig(MODEL).run([*prompt, *following[:, slot]], [len(prompt), 1, 1])
        assert_close(np.array(batched)[:, slot], alone)


def test_a_slot_can_be_filled_to_its_last_row() -> None:
    ids = random_ids(VOCAB, 29)
    assert_close(Rig(MODEL).run(ids, [24, 4, 1])[-1], Rig(MODEL, length=41).run(ids, [20, 9])[-1])


# --- refusals ---


def runs(rig, logits):
    rig.engine.enqueue(rig.stream)
    equal(rig.logits[:1].numpy(), logits)


def state(rig: Rig) -> list[bytes]:
    return [array.tobytes() for array in rig.caches()] + [rig.logits.numpy().tobytes()]


def test_each_profile_keeps_its_own_bindings_and_shapes() -> None:
    rig = Rig(MODEL)
    ids = random_ids(VOCAB, 1, 7)
    expected = rig.step(ids, [0])
    rig.step(ids[:, :1], [7], profile=DECODE)
    rig.engine.use_profile(PREFILL)
    rig.engine.enqueue(rig.stream)
    np.testing.assert_array_equal(rig.logits[:1].numpy(), expected)


def misaligned(rig: Rig) -> None:
    rig.engine.bind("k_cache_0", rig.to_memory(np.zeros(10000, np.float32))[4:])


def combined(rig: Rig) -> None:
    cache = KVCacheManager(replace(rig.kv, layout=KVLayout.COMBINED), memory=rig.memory)
    rig.engine.bind("v_cache_0", cache.get_separate_kv_cache(0)[1])


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda rig: rig.engine.bind("k_cache_2", rig.logits),
            BindingError,
            "`k_cache_2`: the engine has no such tensor. It has input_ids, ",
        ),
        (
            lambda rig: rig.engine.bind("k_cache_0", rig.to_memory(np.zeros((3, 2, 29, 16), np.float16))),
            BindingError,
            r"`k_cache_0` expects float32 \(-1, 2, 29, 16\), got float16 \(3, 2, 29, 16\)",
        ),
        (
            lambda rig: rig.engine.bind("logits", Rig(MODEL).logits),
            BindingError,
            r"`logits`: expected a tensor in the engine's memory \(cpu\), got DeviceTensor",
        ),
        (misaligned, LayoutError, "`k_cache_0`: expected an address that is a multiple of 256, got 0x"),
        (combined, LayoutError, "`v_cache_0`: expected a contiguous view, got shape .* with strides"),
        (lambda rig: rig.engine.set_input_shape("logits", (1, 67)), BindingError, "`logits`: expected an input, got an output"),
        (lambda rig: rig.engine.set_input_shape("nothing", (1,)), BindingError, "`nothing`: the engine has no such tensor"),
        (
            lambda rig: rig.engine.set_input_shape("input_ids", (4, 5)),
            BindingError,
            r"`input_ids`: expected a shape within \[1\.\.3, 1\.\.24\] \(profile 'prefill'\), got \[4, 5\]",
        ),
        (lambda rig: rig.engine.set_input_shape("input_ids", (1, 25)), BindingError, r"got \[1, 25\]"),
        (lambda rig: rig.engine.set_input_shape("input_ids", (0, 1)), BindingError, r"got \[0, 1\]"),
        (lambda rig: rig.engine.set_input_shape("input_ids", (1,)), BindingError, r"got \[1\]"),
        (
            lambda rig: rig.engine.set_input_shape("k_cache_1", (1, 2, 28, 16)),
            BindingError,
            r"`k_cache_1`: expected a shape within \[1\.\.3, 2, 29, 16\] .*, got \[1, 2, 28, 16\]",
        ),
        (lambda rig: rig.engine.use_profile(2), RangeError, "profile: expected an integer from 0 to 1, got 2"),
    ],
)
def test_wrong_bindings_are_refused_and_change_nothing(act: Callable[[Rig], None], error: type[Exception], message: str) -> None:
    rig = Rig(MODEL)
    ids = random_ids(VOCAB, 1, 5)
    rig.prepare(ids, [0])
    with pytest.raises(error, match=message):
        act(rig)
    rig.engine.enqueue(rig.stream)
    np.testing.assert_array_equal(rig.logits[:1].numpy(), Rig(MODEL).step(ids, [0]))


def test_the_decode_profile_takes_one_token() -> None:
    rig = Rig(MODEL)
    rig.engine.use_profile(DECODE)
    with pytest.raises(BindingError, match=r"within \[1\.\.3, 1\] \(profile 'decode'\), got \[1, 2\]"):
        rig.engine.set_input_shape("input_ids", (1, 2))


def bind_elsewhere(rig: Rig) -> None:
    rig.engine.bind("present_v_cache_1", rig.to_memory(np.zeros((3, 2, 29, 16), np.float32)))


def bind_too_small(name: str) -> Callable[[Rig], None]:
    def act(rig: Rig) -> None:
        view = rig.cache.get_separate_kv_cache(0)[0]
        rig.engine.bind(name, view[:1])

    return act


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda rig: rig.step([[1, 2], [3, 67]], [0, 0]), r"`input_ids`: expected values from 0 to 66, got 67 at \[1, 1\]"),
        (lambda rig: rig.step([[-1]], [0]), r"`input_ids`: expected values from 0 to 66, got -1 at \[0, 0\]"),
        (lambda rig: rig.step([[1, 2]], [0], [2]), r"`last_token_ids`: expected values from 0 to 1, got 2 at \[0, 0\]"),
        (lambda rig: rig.step([[1], [2]], [0, -1]), r"`kvcache_start_index`: expected values from 0 to 29, got -1 at \[1\]"),
        (lambda rig: rig.step([[1]], [30]), r"`kvcache_start_index`: expected values from 0 to 29, got 30 at \[0\]"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(act: Callable[[Rig], None], message: str) -> None:
    rig = Rig(MODEL)
    rig.poison(3.0)
    before = state(rig)
    with pytest.raises(EngineError, match=message):
        act(rig)
    assert state(rig) == before


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (bind_elsewhere, "`present_v_cache_1`: expected the address of `v_cache_1`, 0x.* bind both to one view"),
        (bind_too_small("k_cache_0"), r"`k_cache_0`: a step of shape \(2, 2, 29, 16\) needs more than the 3712 bytes bound"),
        (bind_too_small("present_k_cache_0"), r"`present_k_cache_0`: a step of shape \(2, 2, 29, 16\) needs more than the 3712 bytes"),
        (
            lambda rig: rig.engine.set_input_shape("v_cache_1", (1, 2, 29, 16)),
            r"`v_cache_1`: expected 2 slots as `input_ids` has, got shape \(1, 2, 29, 16\)",
        ),
        (lambda rig: rig.engine.set_input_shape("kvcache_start_index", (3,)), "`kvcache_start_index`: expected 2 slots"),
        (lambda rig: rig.engine.bind("logits", rig.to_memory(np.zeros((1, 67), np.float32))), "`logits`: a step of shape"),
        (lambda rig: rig.engine.use_profile(DECODE), "`input_ids`: no shape was set for profile 'decode'"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(act: Callable[[Rig], None], message: str) -> None:
    rig = Rig(MODEL)
    rig.poison(3.0)
    rig.prepare(random_ids(VOCAB, 2, 5), [0, 3])
    before = state(rig)
    act(rig)
    with pytest.raises(EngineError, match=message):
        rig.engine.enqueue(rig.stream)
    assert state(rig) == before


def test_a_step_with_nothing_bound_is_refused() -> None:
    rig = Rig(MODEL)
    for name, spec in rig.engine.tensors.items():
        if spec.mode is TensorMode.INPUT:
            rig.engine.set_input_shape(name, [1 if size < 0 else size for size in spec.shape])
    with pytest.raises(EngineError, match="`input_ids`: nothing is bound for profile 'prefill'"):
        rig.engine.enqueue(rig.stream)


def test_a_foreign_stream_is_refused() -> None:
    rig = Rig(MODEL)
    rig.prepare([[1]], [0])
    with pytest.raises(PlaceError):
        rig.engine.enqueue(object())


def test_a_closed_cache_is_refused() -> None:
    rig = Rig(MODEL)
    rig.prepare([[1]], [0])
    rig.cache.close()
    with pytest.raises(ClosedError):
        rig.engine.enqueue(rig.stream)


def test_close_releases_what_was_bound_and_is_idempotent() -> None:
    rig = Rig(MODEL)
    rig.step([[1]], [0])
    live = rig.memory.live_nbytes
    rig.engine.close()
    rig.engine.close()
    trees = 8 * MAX_TREE_TOKENS * rig.kv.max_batch_size
    assert rig.memory.live_nbytes == live - trees - 12  # and three inputs of one int32, which only the engine held
    for act in (lambda: rig.engine.enqueue(rig.stream), lambda: rig.engine.bind("logits", rig.logits), lambda: rig.engine.use_profile(0)):
        with pytest.raises(ClosedError, match=f"this {type(rig.engine).__name__} is closed"):
            act()


LAYER = KVLayerConfig(num_kv_heads=HEADS, head_dim=HEAD_DIM)


def layer(heads=HEADS, head_dim=HEAD_DIM):
    return KVLayerConfig(num_kv_heads=heads, head_dim=head_dim)


def engine(changes=(), **options):
    kv = KVCacheConfig(**{"layers": [layer()] * 2, "max_batch_size": 3, "max_sequence_length": 29, "dtype": "float32", **dict(changes)})
    with Checkpoint.open(GOLDEN / MODEL) as checkpoint:
        return ReferenceEngine(checkpoint, **{"kv": kv, "max_prefill_length": 7, "memory": HostMemory(), **options})


MODELS = [
    ({"layers": [layer()] * 3}, {}, ConfigError, r"kv\.layers: expected 2 as the model has, got 3"),
    ({"layers": [layer(), layer(4)]}, {}, ConfigError, r"kv\.layers\[1\]: .*num_kv_heads=2.*num_kv_heads=4"),
    ({"layers": [layer(), layer(2, 32)]}, {}, ConfigError, r"kv\.layers\[1\]: .*head_dim=16.*head_dim=32"),
    ({"dtype": "int8"}, {}, ConfigError, r"^dtype with K and V in int8: expected one of float16, bfloat16, float32, got None\.$"),
    ({"dtype": "int8"}, {"dtype": "int8"}, ConfigError, r"^dtype with K and V in int8: expected one of .*, got 'int8'\.$"),
    ({"dtype": "int8"}, {"dtype": "float16"}, ConfigError, r"^attention: expected 'plugin' for K and V in int8, got 'native'\.$"),
    ({}, {"dtype": "float16"}, ConfigError, r"^dtype: expected float32 as the cache, got 'float16'\.$"),
    ({}, {"max_prefill_length": 30}, ConfigError, "max_prefill_length: expected an integer from 1 to 29, got 30"),
    ({"layout": KVLayout.COMBINED}, {}, ConfigError, "kv.layout: expected .*SEPARATE for attention 'native', got .*COMBINED."),
    ({}, {"attention": "plugin"}, ConfigError, "kv.layout: expected .*COMBINED for attention 'plugin', got .*SEPARATE."),
    ({}, {"attention": "fused"}, ConfigError, "attention: expected one of native, mask, plugin, got 'fused'"),
    ({}, {"memory": SimpleNamespace(is_host=False, device="cuda:3")}, PlaceError, "expected host memory, .*, got cuda:3"),
]


@pytest.mark.parametrize(("changes", "options", "error", "message"), MODELS)
def test_what_does_not_fit_the_model(changes, options, error, message):
    with pytest.raises(error, match=message):
        engine(changes, **options)


def test_other_names() -> None:
    names = TensorNames(input_ids="tokens", k_cache="past.{i}.k", present_k_cache="now.{i}.k")
    kv = KVCacheConfig(layers=[LAYER] * 2, max_batch_size=3, max_sequence_length=29)
    with Checkpoint.open(GOLDEN / MODEL) as checkpoint:
        engine = ReferenceEngine(checkpoint, kv=kv, max_prefill_length=7, names=names, memory=HostMemory())
    assert {"tokens", "past.1.k", "now.0.k", "v_cache_1"} <= set(engine.tensors)
    assert engine.tensors["now.0.k"].alias == "past.0.k"


def test_the_plugin_has_one_cache_tensor_per_layer():
    rig = Rig(MODEL, length=29, dtype="bfloat16", attention="plugin")
    specs = [spec for spec in rig.engine.tensors.values() if len(spec.shape) > 2]
    assert [(spec.name, spec.shape, spec.dtype, spec.alias) for spec in specs] == [
        (name, (-1, 2, HEADS, 29, HEAD_DIM), "bfloat16", alias)
        for name, alias in [
            ("past_key_values_0", None),
            ("past_key_values_1", None),
            ("present_key_values_0", "past_key_values_0"),
            ("present_key_values_1", "past_key_values_1"),
        ]
    ]
