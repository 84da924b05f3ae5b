from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
from trt_kvcache.checkpoint import Checkpoint
from trt_kvcache.errors import BindingError, ClosedError, ConfigError, EngineError, LayoutError, PlaceError
from trt_kvcache.reference import ReferenceEngine

from .rig import DECODE, GOLDEN, SAME_LOGITS, Rig, random_ids

MODEL = "llama-llama3-bias"
VOCAB = 67

# Finite in every dtype, and large beside any key or value of the models.
LARGE = 1e4


@pytest.mark.parametrize("attention", ["native", "mask", "plugin"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
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


@pytest.mark.parametrize(
    ("attention", "dead"),
    [("native", np.nan), ("native", np.inf), ("plugin", np.nan), ("plugin", LARGE), ("mask", LARGE), ("mask", -LARGE)],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dead_rows_change_no_bit(attention, dead, dtype):
    ids, widths = random_ids(VOCAB, 17), [7, 1, 8, 1]
    clean, poisoned = (Rig(MODEL, dtype=dtype, attention=attention) for _ in range(2))
    poisoned.poison(dead)
    np.testing.assert_array_equal(poisoned.run(ids, widths), clean.run(ids, widths))


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_a_ragged_batch_equals_each_row_alone(attention):
    prompts = [random_ids(VOCAB, size, seed=size) for size in (3, 9, 5)]
    following = random_ids(VOCAB, 2, 3)
    padded = np.stack([np.pad(prompt, (0, 9 - len(prompt))) for prompt in prompts])
    rig, lengths = Rig(MODEL, attention=attention), np.array([3, 9, 5])
    batched = [rig.step(padded, [0, 0, 0], lengths - 1)]
    for step, tokens in enumerate(following):
        batched.append(rig.step(tokens[:, None], lengths + step, profile=DECODE))
    for slot, prompt in enumerate(prompts):
        alone = Rig(MODEL).run([*prompt, *following[:, slot]], [len(prompt), 1, 1])
        np.testing.assert_allclose(np.array(batched)[:, slot], alone, rtol=0, atol=SAME_LOGITS)


def zeros(*shape, dtype=np.float32):
    return lambda rig: rig.to_memory(np.zeros(shape, dtype))


def combined(rig):
    return KVCacheManager(replace(rig.kv, layout=KVLayout.COMBINED), memory=rig.memory).get_separate_kv_cache(0)[1]


@pytest.mark.parametrize(
    ("name", "view", "error", "message"),
    [
        ("k_cache_2", zeros(1), BindingError, "`k_cache_2`: the engine has no such tensor. It has input_ids, "),
        ("k_cache_0", zeros(3, 2, dtype=np.float16), BindingError, r"`k_cache_0` expects float32 \(-1, 2, 29, 16\), got float16 \(3, 2\)"),
        ("k_cache_0", lambda rig: zeros(10000)(rig)[4:], LayoutError, "`k_cache_0`: expected an address that is a multiple of 256, got 0x"),
        ("v_cache_0", combined, LayoutError, "`v_cache_0`: expected a dense view, got shape .* with strides"),
    ],
)
def test_wrong_bindings_are_refused_and_change_nothing(name, view, error, message):
    rig, ids = Rig(MODEL), random_ids(VOCAB, 1, 5)
    rig.prepare(ids, [0])
    with pytest.raises(error, match=message):
        rig.engine.bind(name, view(rig))
    rig.engine.enqueue(rig.stream)
    np.testing.assert_array_equal(rig.logits[:1].numpy(), Rig(MODEL).step(ids, [0]))


def step(*values):
    return lambda rig: rig.prepare(*values)


def bind(name, view):
    return lambda rig: rig.engine.bind(name, view(rig))


def one_slot(rig):
    return rig.cache.get_separate_kv_cache(0)[0][:1]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (step([[1, 2], [3, 67]], [0, 0]), r"`input_ids`: expected values from 0 to 66, got 67 at \[1, 1\]"),
        (step([[1, 2]], [0], [2]), r"`last_token_ids`: expected values from 0 to 1, got 2 at \[0\]"),
        (step([[1], [2]], [0, -1]), r"`kvcache_start_index`: expected values from 0 to 29, got -1 at \[1\]"),
        (bind("present_v_cache_1", zeros(3, 2, 29, 16)), "`present_v_cache_1`: expected the address of `v_cache_1`, 0x.* bind both"),
        (bind("k_cache_0", one_slot), r"`k_cache_0`: a step of shape \(2, 2, 29, 16\) needs more than the 3712 bytes bound"),
        (lambda rig: rig.engine.set_input_shape("v_cache_1", (1, 2, 29, 16)), "`v_cache_1`: expected 2 slots as `input_ids` has, got"),
        (lambda rig: rig.engine.use_profile(DECODE), "`input_ids`: no shape was set for profile 'decode'"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(act, message):
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
    with pytest.raises(ClosedError, match="this ReferenceEngine is closed"):
        rig.engine.enqueue(rig.stream)


LAYER = KVLayerConfig(num_kv_heads=2, head_dim=16)


def engine(changes=(), **options):
    kv = KVCacheConfig(**{"layers": [LAYER] * 2, "max_batch_size": 3, "max_sequence_length": 29, "dtype": "float32", **dict(changes)})
    with Checkpoint.open(GOLDEN / MODEL) as checkpoint:
        return ReferenceEngine(checkpoint, **{"kv": kv, "max_prefill_length": 7, "memory": HostMemory(), **options})


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"layers": [LAYER] * 3}, {}, ConfigError, r"kv\.layers: expected 2 as the model has, got 3"),
        ({"layers": [LAYER, replace(LAYER, head_dim=32)]}, {}, ConfigError, r"kv\.layers\[1\]: .*head_dim=16.*head_dim=32"),
        ({"dtype": "int8"}, {}, ConfigError, r"kv\.dtype: expected one of float16, bfloat16, float32, got 'int8', which is storage only"),
        ({}, {"max_prefill_length": 30}, ConfigError, "max_prefill_length: expected an integer from 1 to 29, got 30"),
        ({"layout": KVLayout.COMBINED}, {}, ConfigError, "kv.layout: expected .*SEPARATE for attention 'native', got .*COMBINED."),
        ({}, {"memory": SimpleNamespace(is_host=False, device="cuda:3")}, PlaceError, "expected host memory, .*, got cuda:3"),
    ],
)
def test_what_does_not_fit_the_model(changes, options, error, message):
    with pytest.raises(error, match=message):
        engine(changes, **options)
