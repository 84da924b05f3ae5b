"""``SequenceCacheManager``: which rows and states a handle has, and what is refused."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

from tests.helpers.cache_cases import (
    ATTENTION,
    HEADS,
    MAMBA,
    B,
    CapturingMemory,
    Image,
    S,
    Unchanged,
    fill_all,
    kv_config,
    make_cache,
    mamba_config,
)
from tests.helpers.sequence_cases import STATES, TAKEN, TOKEN, Sequences, joined, make, raw, tokens
from trt_kvcache import HybridCacheConfig, HybridCacheManager, SequenceCacheManager
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    LengthsUnknown,
    PlaceError,
    RangeError,
    SequenceError,
    ShapeError,
    SlotError,
)


@pytest.mark.parametrize(("kind", "dtype"), [("manager", "float8_e4m3fn"), ("linear", "bfloat16")])
def test_append_and_get(memory, stream, kind, dtype):
    cache, sequences = make(kind, memory, stream, states=False, dtype=dtype)
    fill_all(cache, stream)
    expected = Image(cache)
    a, b = sequences.create_sequence(), sequences.create_sequence()
    parts = [tokens(cache, count, seed) for seed, count in enumerate((3, 0, 2))]
    for seq, part in zip((a, a, a, b), (*parts, parts[0]), strict=True):
        sequences.append(seq, *part)
    keys, values = sequences.get(a)
    assert [array.shape for array in values] == [(h, 5, d) for h, d in ([HEADS[0]] * 2 if kind == "linear" else HEADS)]
    assert (isinstance(keys, np.ndarray), sequences.dtype, values[0].dtype) == (kind == "linear", dtype, numpy_dtype(dtype))
    assert raw((keys, values)) == raw(joined(*parts))
    assert (sequences.length(a), sequences.length(b), sequences.num_sequences) == (5, 3, 2)
    for slot, pair in ((4, (keys, values)), (3, sequences.get(b))):
        for layer, rows in enumerate(expected.rows):
            for which in (0, 1):
                rows[slot, which, :, : pair[which][layer].shape[1]] = pair[which][layer].view(np.uint8)
    expected.check(cache)
    keys[0][...] = 0  # a copy
    assert raw(sequences.get(a)) == raw(joined(*parts))


def test_what_append_takes(memory, stream):
    """One array or one per layer, of any strides, on the host or on a device. It may be changed as soon as the call returns."""
    cache, sequences = make("linear", memory, stream, states=False)
    keys, values = tokens(cache, 3, 1)
    wide = np.stack([keys, values], axis=-1)
    staged = [memory.staging(keys.shape, "float16") for _ in range(2)]  # which a copy may read at any time until it is done
    staged[0][...], staged[1][...] = keys, values
    on_device = memory.to_device(keys, stream=stream), [memory.to_device(layer, stream=stream) for layer in values]
    for form in ((keys, list(values)), (wide[..., 0], wide[..., 1]), on_device, staged):
        seq = sequences.create_sequence()
        sequences.append(seq, *form)
        if form is staged:
            staged[0][...] = staged[1][...] = 0
        assert raw(sequences.get(seq)) == raw((keys, values))


@pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
def test_bytes(memory, stream, kind):
    cache, sequences = make(kind, memory, stream, states=False, swapping=True, threshold=0.5)
    token, states = TOKEN[kind], STATES if kind == "hybrid" else 0
    assert (sequences.memory_capacity, sequences.memory_used, sequences.memory_swapped) == (B * (S * token + states), 0, 0)
    assert (sequences.max_sequences, make(kind, memory, stream)[1].max_sequences) == (None, B)
    if kind == "hybrid":
        cache.reset_for_new_sequences([0, 3])
        assert sequences.memory_used == 3 * token + states
    else:
        (seq,) = sequences.new(4)
        cache.reset_for_new_sequences([0, 3])
        assert sequences.memory_used == 7 * token
        for more, used, swapped in ((7, 14, 0), (4, 14, 4)):  # 18 of 35 are past a half
            sequences.new(more)
            assert (sequences.memory_used, sequences.memory_swapped) == (used * token, swapped * token)
        sequences.check(seq, 4)  # and 18 are again: the one with 7 goes
        assert (sequences.memory_used, sequences.memory_swapped) == (11 * token, 7 * token)
    sequences.destroy_all_sequences()
    assert (sequences.num_sequences, sequences.memory_swapped) == (0, 0)


def test_without_swapping_there_are_as_many_as_slots(memory, stream):
    cache, sequences = make("manager", memory, stream, threshold=0.01)
    cache.set_active_batch_size(2)
    ids = sequences.new(S, S, S)
    full = "free slots, got {} of 5. Destroy sequences, or enable swapping."
    sequences.refuses(CapacityError, f"create_sequence: expected 1 {full.format(0)}", sequences.create_sequence)
    sequences.destroy_sequence(ids[1])
    sequences.reserve(1)
    sequences.refuses(CapacityError, f"reserve: expected 2 {full.format(1)}", sequences.reserve, 2)
    for expected in (3, 4):  # an id is never used again
        assert sequences.create_sequence() == expected
        assert (sequences.num_sequences, sequences.memory_swapped) == (3, 0)
        sequences.destroy_sequence(expected)
    sequences.check(ids[2], S)


def test_a_hybrid_of_one_kind_of_layers(memory, stream):
    with HybridCacheManager(HybridCacheConfig(layer_types=[ATTENTION] * 3, kv=kv_config()), memory=memory) as cache:
        sequences = Sequences(SequenceCacheManager(cache), stream)
        sequences.check(*sequences.new(2), 2)
    with HybridCacheManager(HybridCacheConfig(layer_types=[MAMBA] * 2, mamba=mamba_config()), memory=memory) as cache:
        sequences = Sequences(SequenceCacheManager(cache), stream)
        assert (sequences.get(sequences.create_sequence()), sequences.dtype) == (([], []), None)
        assert sequences.memory_capacity == B * STATES


def test_in_an_active_slot_the_lengths_are_those_of_the_cache(memory, stream):
    cache, sequences = make("manager", memory, stream)
    a, b = sequences.create_sequence(), sequences.create_sequence()
    parts = [tokens(cache, 2, seed) for seed in range(3)]
    sequences.append(a, *parts[0])
    assert sequences.pin(a) == 4
    sequences.append(a, *parts[1])
    assert sequences.length(a) == 4
    cache.reset_for_new_sequences([1, 1, 1, 0, 4])  # b, which is empty, is run too
    assert (sequences.length(a), sequences.length(b)) == (4, 0)
    for seq in (a, b):
        sequences.append(seq, *parts[2])
    sequences.truncate(a, 5)
    assert cache.host_kv_cache_lengths == tuple(cache.kv_cache_lengths.numpy().tolist()) == (1, 1, 1, 2, 5)
    assert raw(sequences.get(a)) == raw(joined(*parts, count=5))
    text = "sequence 1 is in active slot 3, and no other slot is free. Shrink the active batch, or enable swapping. Nothing was changed."
    sequences.refuses(CapacityError, text, sequences.unpin, b)
    cache.commit_sequence_length(1)
    cache.commit_sequence_length(memory.to_device(np.ones(5, np.int32), stream=stream), max_increment=1)
    with pytest.raises(LengthsUnknown):
        sequences.length(a)
    cache.set_active_batch_size(2)
    assert sequences.length(a) == 7, "the device knows, though the slot is not active any more"
    sequences.unpin(a)
    sequences.truncate(a, 5)
    assert raw(sequences.get(a)) == raw(joined(*parts, count=5))
    assert sequences.length(b) == 4, "it was seen in an active slot"
    assert (sequences.pin(a), sequences.pin(a, slot=4)) == (4, 4)
    cache.reset_for_new_sequences([0, 0, 0, 0, 3])
    sequences.refuses(SequenceError, f"sequence {b}: {TAKEN}", sequences.length, b)
    assert sequences.length(a) == 3, "whoever runs a pinned sequence may shorten it"
    cache.clear_slot(4)
    cache.set_active_batch_size(0)
    assert sequences.length(a) == 0


def test_what_is_refused_changes_nothing(memory, stream):
    cache, sequences = make("manager", memory, stream, swapping=True)
    fill_all(cache, stream)
    cache.reset_for_new_sequences([1])
    seqs = sequences.new(4, 4, 4, 4, 4)
    seq, gone = seqs[0], sequences.create_sequence()
    sequences.destroy_sequence(gone)
    (keys, values), four = tokens(cache, 2, 1), tokens(cache, 4, 1)
    wrong, one = "expected [num_kv_heads, n, head_dim] =", "expected an array [L, H, n, D], or an array [H, n, D] per layer, got"
    unknown, slots = "expected an id that create_sequence returned.", "expected 0 <= slot < 5 (batch slots). Slots never wrap."
    for k, v, error, text in (
        (*four, CapacityError, "sequence 0 holds 4 tokens; appending 4 more exceeds max_sequence_length=7. Nothing was changed."),
        (keys[:2], values, ShapeError, "keys: expected 3 layers, got 2."),
        (keys, [*values, values[0]], ShapeError, "values: expected 3 layers, got 4."),
        (np.array(3), values, ShapeError, f"keys: {one} ndarray."),
        (keys, "abc", ShapeError, f"values: {one} str."),
        (3, values, ShapeError, f"keys: {one} int."),
        (keys, [values[0], values[1], [1]], ShapeError, "values[2]: expected an array [H, n, D], got list."),
        ([np.float32(keys[0]), *keys[1:]], values, DTypeError, "keys[0]: expected float16, which the cache stores, got float32."),
        (keys, [*values[:2], values[2].view(np.int16)], DTypeError, "values[2]: expected float16, which the cache stores, got int16."),
        (keys, four[1], ShapeError, f"values[0]: {wrong} (2, 2, 16), got (2, 4, 16)."),
        (keys[::-1], values, ShapeError, f"keys[0]: {wrong} (2, 2, 16), got (3, 2, 16)."),
        ([keys[0][0], *keys[1:]], values, ShapeError, f"keys[0]: {wrong} (2, 0, 16), got (2, 16)."),
        (keys, [values[0], values[1][:, :, :24], values[2]], ShapeError, f"values[1]: {wrong} (1, 2, 48), got (1, 2, 24)."),
    ):
        sequences.refuses(error, text, sequences.append, seq, k, v)
    calls = [
        (sequences.append, (keys, values)),
        (sequences.get, ()),
        (sequences.truncate, (0,)),
        (sequences.pin, ()),
        (sequences.unpin, ()),
    ]
    of_ids = [*calls, (sequences.length, ()), (sequences.destroy_sequence, ())]
    for call, arguments, error, text in (
        (sequences.truncate, (seq, -1), RangeError, "truncate: sequence 0 holds 4 tokens; expected 0 to 4, got -1."),
        (sequences.truncate, (seq, 5), RangeError, "truncate: sequence 0 holds 4 tokens; expected 0 to 4, got 5."),
        (sequences.truncate, (seq, 1.5), RangeError, "new_length: expected an integer, got 1.5."),
        (sequences.reserve, (-1,), RangeError, "num_sequences: expected at least 0, got -1."),
        (partial(sequences.pin, slot=5), (seq,), SlotError, f"slot 5: {slots}"),
        (partial(sequences.pin, slot=-1), (seq,), SlotError, f"slot -1: {slots}"),
        *((call, (gone, *rest), SequenceError, f"sequence {gone}: it was destroyed.") for call, rest in of_ids),
        *((call, (6, *rest), SequenceError, f"sequence 6: {unknown}") for call, rest in of_ids),
        (sequences.get, (-1,), SequenceError, f"sequence -1: {unknown}"),
        (sequences.get, ("a",), SequenceError, "sequence: expected an integer, got 'a'."),
        (sequences.destroy_sequence, (True,), SequenceError, "sequence: expected an integer, got True."),
    ):
        sequences.refuses(error, text, call, *arguments)
    for call, rest in calls:
        with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
            call(seq, *rest, stream=None)
    sequences.pin(seq, slot=4)
    sequences.get(seqs[-1])
    assert sequences.memory_swapped > 0
    sequences.close()
    sequences.close()
    assert (sequences.num_sequences, sequences.memory_swapped) == (0, 0)
    last = [partial(call, seq, *rest) for call, rest in of_ids]
    for call in (*last, sequences.create_sequence, sequences.destroy_all_sequences, lambda: sequences.reserve(0), sequences.__enter__):
        with pytest.raises(ClosedError, match=r"^this SequenceCacheManager is closed\.$"):
            call()
    again = SequenceCacheManager(cache._manager)
    cache.close()
    with pytest.raises(ClosedError, match=r"^this SequenceCacheManager's cache is closed\.$"):
        again.create_sequence()


def test_how_it_may_be_made(memory):
    cache, mamba = make_cache("manager", memory), make_cache("mamba", memory)
    kinds, number = "expected a KVCacheManager, LinearKVCache or HybridCacheManager, got", "expected a number above 0 and at most 1, got"
    for of, options, text in (
        (mamba, {}, f"SequenceCacheManager: {kinds} MambaCacheManager."),
        (cache, {"enable_swapping": 1}, "enable_swapping: expected True or False, got 1."),
        *((cache, {"swap_threshold": value}, f"swap_threshold: {number} {value!r}.") for value in (0, 1.5, True, "1")),
    ):
        with pytest.raises(ConfigError) as caught:
            SequenceCacheManager(of, **options)
        assert str(caught.value) == text
    sequences = SequenceCacheManager(cache)
    with pytest.raises(ConfigError, match="expected a cache that no other SequenceCacheManager uses, got one in use"):
        SequenceCacheManager(cache)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="SequenceCacheManager owns device memory and cannot be copied"):
            copier(sequences)
    assert sequences.cache is cache


def test_nothing_of_it_is_captured_in_a_graph():
    memory = CapturingMemory()
    cache, sequences = make("manager", memory, memory.create_stream())
    seq = sequences.create_sequence()
    memory.capturing = True
    for name, values in {"append": tokens(cache, 1, 0), "get": (), "truncate": (0,), "pin": (), "unpin": ()}.items():
        with Unchanged(cache), pytest.raises(CaptureError, match=f"^{name} cannot be captured: it waits for the device"):
            getattr(sequences, name)(seq, *values)
    memory.capturing = False
    cache, sequences = make("hybrid", memory, memory.create_stream(), ping_pong=True)
    sequences.create_sequence()
    cache.reset_for_new_sequences([0] * B)
    cache.commit_sequence_length(1)
    memory.capturing = True
    with Unchanged(cache), pytest.raises(CaptureError, match=r"^keep_states cannot be captured: what is replayed later keeps nothing"):
        cache.set_active_batch_size(B - 1)
