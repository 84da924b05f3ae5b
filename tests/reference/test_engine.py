import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

from tests.helpers.fakes import engine_tensors
from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.engine.names import TensorNames
from trt_kvcache.engine.protocol import TensorMode, TensorSpec
from trt_kvcache.errors import BindingError, ClosedError, ConfigError, EngineError, LayoutError, PlaceError, RangeError
from trt_kvcache.reference import ReferenceEngine

from .rig import DECODE, GOLDEN, PREFILL, Rig, random_ids

equal = np.testing.assert_array_equal
MODEL = "llama-llama3-bias"
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
VOCAB, HEADS, HEAD_DIM = 67, 2, 16

# Finite in every dtype, and large beside any key or value of the models.
LARGE = 1e4


def runs(rig, logits):
    rig.engine.enqueue(rig.stream)
    equal(rig.logits[:1].numpy(), logits)


def test_tensors_and_profiles_are_those_of_tensorrt():
    rig = Rig(MODEL, length=29, dtype="float16")
    specs = {**engine_tensors(rig.kv), "logits": TensorSpec.output("logits", (-1, VOCAB), "float32")}
    assert (dict(rig.engine.tensors), specs["v_cache_1"].shape) == (specs, (-1, HEADS, 29, HEAD_DIM))
    key = TensorSpec.output("present_k_cache_1", (-1, HEADS, 29, HEAD_DIM), "float16", alias="k_cache_1")
    assert (specs[key.name], key.name in rig.engine.tensors) == (key, True)
    assert [spec.mode for spec in rig.engine.tensors.values()] == [TensorMode.INPUT] * 7 + [TensorMode.OUTPUT] * 5
    assert rig.engine.memory is rig.memory
    found = [(each.name, each.min_batch, each.max_batch, each.min_width, each.max_width) for each in rig.engine.profiles]
    assert found == [("prefill", 1, 3, 1, 24), ("decode", 1, 3, 1, 1)]


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


@pytest.mark.parametrize(("model", "dtype"), [("qwen2-tied", "float16"), ("llama-bfloat16-old", "bfloat16")])
def test_stored_rows_are_rounded_once(model, dtype):
    """Layer 0 does not depend on the cache: its rows are those of the float32 engine, rounded."""
    exact, rounded = Rig(model), Rig(model, dtype=dtype)
    for rig in (exact, rounded):
        rig.step(random_ids(59, 1, 9), [0])
    for wide, narrow in zip(exact.caches()[:2], rounded.caches()[:2], strict=True):
        equal(wide[0, :, :9].astype(narrow.dtype), narrow[0, :, :9])


def test_weights_are_rounded_to_the_cache(tmp_path):
    """A checkpoint whose float32 weights bfloat16 can hold gives the same logits as the one that it was rounded from."""
    rounded = shutil.copytree(GOLDEN / "llama", tmp_path / "rounded")
    tensors = load_file(rounded / "model.safetensors")
    save_file({name: array.astype(bfloat16).astype(np.float32) for name, array in tensors.items()}, rounded / "model.safetensors")
    ids, widths = random_ids(61, 9), [8, 1]
    logits = Rig(rounded, dtype="bfloat16").run(ids, widths)
    equal(logits, Rig("llama", dtype="bfloat16").run(ids, widths))
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


# Ragged batches and full slots: tests/end_to_end/test_equivalence.py.


def test_each_profile_keeps_its_own():
    rig, ids = Rig(MODEL), random_ids(VOCAB, 1, 7)
    want = rig.step(ids, [0])
    rig.step(ids[:, :1], [7], profile=DECODE)
    rig.engine.use_profile(PREFILL)
    runs(rig, want)


def zeros(*shape, dtype=np.float32):
    return lambda rig: rig.to_memory(np.zeros(shape, dtype))


def combined(rig):
    return KVCacheManager(replace(rig.kv, layout=KVLayout.COMBINED), memory=rig.memory).get_separate_kv_cache(0)[1]


def bind(name, view):
    return lambda rig: rig.engine.bind(name, view(rig))


def shape(name, *sizes):
    return lambda rig: rig.engine.set_input_shape(name, sizes)


def profile(index):
    return lambda rig: rig.engine.use_profile(index)


WITHIN = r"expected a shape within \[1\.\.3,"
IDS = rf"`input_ids`: {WITHIN} 1\.\.24\] \(profile 'prefill'\), got"


CALLS = [
    (bind("k_cache_2", zeros(1)), "`k_cache_2`: the engine has no such tensor. It has input_ids, ", BindingError),
    (
        bind("k_cache_0", zeros(3, 2, dtype=np.float16)),
        r"`k_cache_0` expects float32 \(-1, 2, 29, 16\), got float16 \(3, 2\)",
        BindingError,
    ),
    (bind("logits", lambda _: Rig(MODEL).logits), r"`logits`: expected a tensor in the engine's memory \(cpu\), got", BindingError),
    (
        bind("k_cache_0", lambda rig: zeros(10000)(rig)[4:]),
        "`k_cache_0`: expected an address that is a multiple of 256, got 0x",
        LayoutError,
    ),
    (bind("v_cache_0", combined), "`v_cache_0`: expected a dense view, got shape .* with strides", LayoutError),
    (shape("logits", 1, 67), "`logits`: expected an input, got an output", BindingError),
    (shape("nothing", 1), "`nothing`: the engine has no such tensor", BindingError),
    (shape("input_ids", 4, 5), rf"{IDS} \[4, 5\]", BindingError),
    (shape("input_ids", 1, 25), rf"{IDS} \[1, 25\]", BindingError),
    (shape("input_ids", 1), rf"{IDS} \[1\]", BindingError),
    (shape("k_cache_1", 1, 2, 28, 16), rf"`k_cache_1`: {WITHIN} 2, 29, 16\] .*, got \[1, 2, 28, 16\]", BindingError),
    (profile(2), "profile: expected an integer from 0 to 1, got 2", RangeError),
]


@pytest.mark.parametrize(("act", "message", "error"), CALLS)
def test_what_is_refused_changes_nothing(act, message, error):
    rig, ids = Rig(MODEL), random_ids(VOCAB, 1, 5)
    rig.prepare(ids, [0])
    with pytest.raises(error, match=message):
        act(rig)
    runs(rig, Rig(MODEL).step(ids, [0]))
    rig.engine.use_profile(DECODE)
    with pytest.raises(BindingError, match=r"within \[1\.\.3, 1\] \(profile 'decode'\), got \[1, 2\]"):
        rig.engine.set_input_shape("input_ids", (1, 2))


def one_slot(rig):
    return rig.cache.get_separate_kv_cache(0)[0][:1]


def decode_shapes_only(rig):
    rig.engine.use_profile(DECODE)
    for name, spec in rig.engine.tensors.items():
        if spec.mode is TensorMode.INPUT:
            rig.engine.set_input_shape(name, [1 if size < 0 else size for size in spec.shape])


def values(*step):
    return lambda rig: rig.prepare(*step)


STEPS = [
    (values([[1, 2], [3, 67]], [0, 0]), r"`input_ids`: expected values from 0 to 66, got 67 at \[1, 1\]"),
    (values([[1, 2]], [0], [2]), r"`last_token_ids`: expected values from 0 to 1, got 2 at \[0\]"),
    (values([[1], [2]], [0, -1]), r"`kvcache_start_index`: expected values from 0 to 29, got -1 at \[1\]"),
    (values([[1]], [30]), r"`kvcache_start_index`: expected values from 0 to 29, got 30 at \[0\]"),
    (bind("present_v_cache_1", zeros(3, 2, 29, 16)), "`present_v_cache_1`: expected the address of `v_cache_1`, 0x.* bind both"),
    (bind("k_cache_0", one_slot), r"`k_cache_0`: a step of shape \(2, 2, 29, 16\) needs more than the 3712 bytes bound"),
    (bind("present_k_cache_0", one_slot), r"`present_k_cache_0`: a step of shape \(2, 2, 29, 16\) needs more than the 3712 bytes"),
    (bind("logits", zeros(1, 67)), "`logits`: a step of shape"),
    (shape("v_cache_1", 1, 2, 29, 16), "`v_cache_1`: expected 2 slots as `input_ids` has, got"),
    (decode_shapes_only, "`input_ids`: nothing is bound for profile 'decode'"),
    (profile(DECODE), "`input_ids`: no shape was set for profile 'decode'"),
]


@pytest.mark.parametrize(("act", "message"), STEPS)
def test_a_refused_step_writes_nothing(act, message):
    rig = Rig(MODEL)
    rig.poison(3.0)
    rig.prepare(random_ids(VOCAB, 2, 5), [0, 3])
    states = ([*(array.tobytes() for array in rig.caches()), rig.logits.numpy().tobytes()] for _ in range(2))
    before = next(states)
    act(rig)
    with pytest.raises(EngineError, match=message):
        rig.engine.enqueue(rig.stream)
    assert next(states) == before


def test_a_foreign_stream_and_a_closed_cache():
    rig = Rig(MODEL)
    rig.prepare([[1]], [0])
    with pytest.raises(PlaceError):
        rig.engine.enqueue(object())
    rig.cache.close()
    with pytest.raises(ClosedError):
        rig.engine.enqueue(rig.stream)


def test_close_lets_go_and_is_idempotent():
    rig = Rig(MODEL)
    rig.step([[1]], [0])
    live = rig.memory.live_nbytes
    rig.engine.close()
    rig.engine.close()
    assert rig.memory.live_nbytes == live - 12  # the three inputs of one int32, which only the engine held
    for act in (lambda: rig.engine.enqueue(rig.stream), lambda: rig.engine.bind("logits", rig.logits), lambda: rig.engine.use_profile(0)):
        with pytest.raises(ClosedError, match="this ReferenceEngine is closed"):
            act()


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
    ({"dtype": "int8"}, {}, ConfigError, r"kv\.dtype: expected one of float16, bfloat16, float32, got 'int8', which is storage only"),
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


def test_other_names():
    tensors = engine(names=TensorNames(input_ids="tokens", k_cache="past.{i}.k", present_k_cache="now.{i}.k")).tensors
    assert {"tokens", "past.1.k", "now.0.k", "v_cache_1"} <= set(tensors)
    assert tensors["now.0.k"].alias == "past.0.k"
