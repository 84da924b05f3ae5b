"""``SequenceCacheManager``: which rows and states a handle has, wherever they are, and what is refused."""

from __future__ import annotations

import copy
import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from cache_cases import ATTENTION, HEADS, MAMBA, B, CapturingMemory, Image, S, Unchanged, fill_all, make_cache, mamba_config
from cache_cases import kv_config as cache_kv_config
from fakes import Journal, RecordingCache, RecordingEngine, RecordingMemory, kv_config, logits_after
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simt.standin import ALLOCATIONS, StandIn, needs_standin

from trt_kvcache import (
    HostMemory,
    HybridCacheConfig,
    HybridCacheManager,
    InferenceSession,
    KVCacheConfig,
    KVCacheManager,
    KVLayerConfig,
    KVLayout,
)
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    KVCacheError,
    LengthsUnknown,
    PlaceError,
    RangeError,
    SequenceError,
    ShapeError,
    SlotError,
)
from trt_kvcache.sequences import SequenceCacheManager

LAYOUTS = pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
RECURRENT = pytest.mark.parametrize("kind", ["linear", "hybrid"])
#: Bytes of one token, and of the states of one slot, of the cases in float16.
TOKEN = {"manager": 2 * 2 * (2 * 16 + 48 + 3 * 16), "linear": 2 * 2 * 2 * (2 * 16), "hybrid": 2 * 2 * (2 * 16 + 48 + 3 * 16)}
STATES = 2 * (30 * 4 + 21 * 2)


def make(kind: str, memory: Any, *, states: bool = True, swapping: bool = False, threshold: float = 1.0, **changes: Any) -> Any:
    changes |= {} if states or kind != "linear" else {"num_mamba_layers": 0}
    cache = make_cache(kind, memory, **changes)
    return cache, SequenceCacheManager(cache, enable_swapping=swapping, swap_threshold=threshold)


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bits, NaN with a payload among them."""
    size = numpy_dtype(dtype).itemsize
    random = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
    return random.view(numpy_dtype(dtype))


def tokens(cache: Any, count: int, seed: int) -> tuple[Any, Any]:
    """Keys and values of new tokens, as ``append`` takes them."""
    kv = cache.kv_config
    keys, values = (
        [bits((x.num_kv_heads, count, x.head_dim), kv.dtype, 100 * seed + 10 * which + i) for i, x in enumerate(kv.layers)]
        for which in (0, 1)
    )
    return (np.stack(keys), np.stack(values)) if kv.is_uniform else (keys, values)


def raw(pair: Any) -> list[tuple[tuple[int, ...], bytes]]:
    """K and V of each layer, in a form that compares bits."""
    return [(layer.shape, layer.tobytes()) for arrays in pair for layer in arrays]


def joined(*parts: Any) -> Any:
    """The tokens of several appends."""
    return [[np.concatenate(layers, axis=1) for layers in zip(*arrays, strict=True)] for arrays in zip(*parts, strict=True)]


def first(pair: Any, count: int) -> Any:
    return [[layer[:, :count] for layer in arrays] for arrays in pair]


def handles(sequences: Any) -> Any:
    """Everything that an operation could change in the table."""
    table = sequences._table
    entries = [(e.id, e.slot, e.length, e.pinned, e.saved and [a.tobytes() for a in (*e.saved.rows, *e.saved.states)]) for e in table]
    return entries, set(table._taken), sequences.memory_used, sequences.memory_swapped


@pytest.mark.parametrize("kind", ["manager", "linear"])
@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_append_and_get(memory, stream, kind, layout, dtype):
    cache, sequences = make(kind, memory, states=False, layout=layout, dtype=dtype)
    with cache, sequences:
        fill_all(cache, stream)
        expected = Image(cache)
        a, b = sequences.create_sequence(), sequences.create_sequence()
        parts = [tokens(cache, count, seed) for seed, count in enumerate((3, 0, 2))]
        for number, part in enumerate(parts):
            sequences.append(a, *part, stream=stream)
            sequences.append(b, *tokens(cache, number, 9 + number), stream=stream)
        keys, values = sequences.get(a, stream=stream)
        layers = len(cache.kv_config.layers)
        if kind == "linear":
            assert (keys.shape, values.shape, keys.dtype) == ((layers, 2, 5, 16), (layers, 2, 5, 16), numpy_dtype(dtype))
        else:
            assert [array.shape for array in values] == [(h, 5, d) for h, d in HEADS]
        assert (sequences.dtype, numpy_dtype(dtype)) == (dtype, values[0].dtype)
        assert raw((keys, values)) == raw(joined(*parts))
        assert (sequences.length(a), sequences.length(b), sequences.num_sequences) == (5, 3, 2)
        for slot, pair in ((4, joined(*parts)), (3, sequences.get(b, stream=stream))):
            for layer, rows in enumerate(expected.rows):
                for which in (0, 1):
                    rows[slot, which, :, : pair[which][layer].shape[1]] = pair[which][layer].view(np.uint8)
        expected.check(cache)
        keys[0][...] = 0  # a copy
        assert raw(sequences.get(a, stream=stream)) == raw(joined(*parts))
        assert raw(sequences.get(sequences.create_sequence(), stream=stream)) == raw(first(parts[0], 0))
        sequences.truncate(a, 4, stream=stream)
        sequences.append(a, *parts[0], stream=stream)
        assert raw(sequences.get(a, stream=stream)) == raw(joined(first(joined(*parts), 4), parts[0]))


def test_what_append_takes(memory, stream):
    """One array or one per layer, of any strides, on the host or on a device. It may be changed as soon as the call returns."""
    cache, sequences = make("linear", memory, states=False)
    keys, values = tokens(cache, 3, 1)
    expected = raw((keys, values))
    wide = np.stack([keys, values], axis=-1)
    forms = [
        (keys, list(values)),
        (wide[..., 0], wide[..., 1]),
        (memory.to_device(keys, stream=stream), [memory.to_device(layer, stream=stream) for layer in values]),
        tuple(memory.staging(keys.shape, "float16") for _ in range(2)),  # which a copy may read at any time until it is done
    ]
    forms[-1][0][...], forms[-1][1][...] = keys, values
    for form in forms:
        seq = sequences.create_sequence()
        sequences.append(seq, *form, stream=stream)
        if form is forms[-1]:
            form[0][...] = form[1][...] = 0
        assert raw(sequences.get(seq, stream=stream)) == expected
    cache.close()


@pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
def test_bytes(memory, stream, kind):
    cache, sequences = make(kind, memory, states=False, swapping=True, threshold=0.5)
    token, states = TOKEN[kind], STATES if kind == "hybrid" else 0
    assert (sequences.memory_capacity, sequences.memory_used, sequences.memory_swapped) == (B * (S * token + states), 0, 0)
    assert sequences.max_sequences is None
    assert make(kind, memory)[1].max_sequences == B
    seq = sequences.create_sequence()
    if kind == "hybrid":
        cache.reset_for_new_sequences([0, 3], stream=stream)
        assert sequences.memory_used == 3 * token + states
    else:
        sequences.append(seq, *tokens(cache, 4, 0), stream=stream)
        cache.reset_for_new_sequences([0, 3], stream=stream)
        assert sequences.memory_used == 7 * token
        other = sequences.create_sequence()
        sequences.append(other, *tokens(cache, 7, 1), stream=stream)
        assert (sequences.memory_used, sequences.memory_swapped) == (14 * token, 0)
        sequences.append(sequences.create_sequence(), *tokens(cache, 4, 2), stream=stream)  # 18 of 35 are past a half
        assert (sequences.memory_used, sequences.memory_swapped) == (14 * token, 4 * token)
        assert sequences.get(seq, stream=stream)[0][0].shape[1] == 4  # and 18 are again: the one with 7 goes
        assert (sequences.memory_used, sequences.memory_swapped) == (11 * token, 7 * token)
    sequences.destroy_all_sequences()
    assert (sequences.num_sequences, sequences.memory_swapped) == (0, 0)
    cache.close()


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_swapped_and_back_bit_for_bit(memory, stream, layout, dtype):
    cache, sequences = make("manager", memory, swapping=True, layout=layout, dtype=dtype)
    fill_all(cache, stream)
    ids = [sequences.create_sequence() for _ in range(3 * B)]
    held = [tokens(cache, 1 + number % S, number) for number in ids]
    for number in ids:
        sequences.append(number, *held[number], stream=stream)
    assert sequences.memory_swapped > 0
    streams = stream, memory.create_stream()
    for number in np.random.default_rng(0).permutation(ids * 2):
        assert sequences.length(number) == 1 + number % S
        assert raw(sequences.get(number, stream=streams[number % 2])) == raw(held[number])
    cache.close()


def test_the_one_used_longest_ago_goes_and_no_pinned_active_or_used_one(memory, stream):
    cache, sequences = make("manager", memory, swapping=True)
    cache.reset_for_new_sequences([2], stream=stream)
    a, b, c, d = (sequences.create_sequence() for _ in range(4))
    for seq in (a, b, c, d):
        sequences.append(seq, *tokens(cache, 1, seq), stream=stream)
    where = lambda: {entry.id: entry.slot for entry in sequences._table}  # noqa: E731
    assert where() == {a: 4, b: 3, c: 2, d: 1}
    sequences.get(a, stream=stream)
    assert sequences.pin(b, stream=stream) == 3
    e = sequences.create_sequence()
    assert where()[e] is None
    sequences.get(e, stream=stream)
    assert where() == {a: 4, b: 3, c: None, d: 1, e: 2}
    sequences.truncate(c, 1, stream=memory.create_stream())  # d makes way, and c is in another slot
    assert where() == {a: 4, b: 3, c: 1, d: None, e: 2}
    for seq in (a, c, e):
        sequences.pin(seq, stream=stream)
    sequences.reserve(0)
    full = "expected 1 free slots, got 0 of 5. All are active or pinned."
    for what, call in (("reserve", lambda: sequences.reserve(1)), ("create_sequence", sequences.create_sequence)):
        with pytest.raises(CapacityError) as caught:
            call()
        assert str(caught.value) == f"{what}: {full}"
    before = handles(sequences)
    with Unchanged(cache), pytest.raises(CapacityError) as caught:
        sequences.get(d, stream=stream)
    assert str(caught.value) == f"sequence {d} has no slot, and all slots are active or pinned. Nothing was changed."
    assert handles(sequences) == before
    for seq in (c, a):
        sequences.unpin(seq, stream=stream)
    sequences.reserve(9)
    assert sequences.pin(d, stream=stream) == 1
    assert raw(sequences.get(c, stream=memory.create_stream())) == raw(tokens(cache, 1, c))
    assert where()[a] is None
    assert raw(sequences.get(d, stream=stream)) == raw(tokens(cache, 1, d))
    sequences.destroy_sequence(c)
    sequences.reserve(9)  # one slot is free, and enough
    cache.reset_for_new_sequences([1] * B, stream=stream)  # all of them are run now
    with pytest.raises(CapacityError, match="All are active or pinned"):
        sequences.create_sequence()
    sequences.unpin(d, stream=stream)
    assert where()[d] is None, "no slot is left for it but the host"
    assert raw(sequences.get(b, stream=stream)) == raw(tokens(cache, 1, b))
    with pytest.raises(CapacityError, match="has no slot"):
        sequences.get(d, stream=stream)
    cache.close()


def test_no_more_than_need_be_goes(memory, stream):
    cache, sequences = make("manager", memory, swapping=True, threshold=0.16)  # of 35 tokens: 5.6
    ids = [sequences.create_sequence() for _ in range(6)]
    for seq in ids:
        sequences.append(seq, *tokens(cache, 1, seq), stream=stream)
    assert sequences.memory_swapped == TOKEN["manager"]
    sequences.destroy_all_sequences()
    _, *ids = (sequences.create_sequence() for _ in range(3))
    for seq in ids:
        sequences.append(seq, *tokens(cache, 3, seq), stream=stream)
    assert [entry.slot for entry in sequences._table] == [4, None, 2], "without tokens nothing is gained"
    cache.close()


def test_without_swapping_there_are_as_many_as_slots(memory, stream):
    cache, sequences = make("manager", memory, threshold=0.01)
    cache.set_active_batch_size(2, stream=stream)
    ids = [sequences.create_sequence() for _ in range(3)]
    for seq in ids:
        sequences.append(seq, *tokens(cache, S, seq), stream=stream)
    with pytest.raises(CapacityError) as caught:
        sequences.create_sequence()
    assert str(caught.value) == "create_sequence: expected 1 free slots, got 0 of 5. Destroy sequences, or enable swapping."
    sequences.destroy_sequence(ids[1])
    sequences.reserve(1)
    with pytest.raises(CapacityError, match=r"^reserve: expected 2 free slots, got 1 of 5\. "):
        sequences.reserve(2)
    assert sequences.create_sequence() == 3, "an id is never used again"
    sequences.destroy_sequence(3)
    assert sequences.create_sequence() == 4
    assert (sequences.num_sequences, sequences.memory_swapped) == (3, 0)
    assert raw(sequences.get(ids[2], stream=stream)) == raw(tokens(cache, S, 2))
    cache.close()


@RECURRENT
@pytest.mark.parametrize("ping_pong", [False, True])
def test_run_by_an_engine_put_away_with_its_states_and_run_again_elsewhere(memory, stream, kind, ping_pong):
    cache, sequences = make(kind, memory, swapping=True, ping_pong=ping_pong)
    fill_all(cache, stream)
    expected = Image(cache)
    seq = sequences.create_sequence()
    assert sequences.pin(seq, stream=stream) == 4
    expected.zero_states(4)
    expected.check(cache)
    cache.set_active_batch_size(2, stream=stream)
    assert sequences.pin(seq, slot=1, stream=stream) == 1
    expected.zero_states(0, 1)
    expected.check(cache)
    fill_all(cache, stream, 1)  # what an engine does
    cache.commit_sequence_length([0, 5], stream=stream)
    held = Image(cache)
    assert (sequences.length(seq), sequences.memory_used) == (5, 5 * TOKEN[kind] + (1 + ping_pong) * STATES)
    expected = Image(cache)
    sequences.unpin(seq, stream=stream)
    put(expected, 4, held, 1, 5)
    expected.check(cache)
    assert (cache.host_kv_cache_lengths, sequences.length(seq)) == ((0, 5), 5)
    cache.clear_slot(1, stream=stream)
    for _ in range(3):
        sequences.pin(sequences.create_sequence(), stream=stream)
    assert sequences.memory_swapped == 5 * TOKEN[kind] + STATES
    cache.swap()
    fill_all(cache, stream, 2)
    expected = Image(cache)
    assert sequences.pin(seq, slot=0, stream=stream) == 0
    put(expected, 0, held, 1, 5)
    expected.check(cache)
    for which, arrays in enumerate(sequences.get(seq, stream=stream)):
        for rows, array in zip(held.rows, arrays, strict=True):
            assert np.array_equal(array.view(np.uint8), rows[1, which, :, :5])
    assert (cache.host_kv_cache_lengths, cache.lengths.tensor.numpy().tolist()[:2], sequences.memory_swapped) == ((5, 0), [5, 0], 0)
    before = handles(sequences)
    for what, call in {
        "append": lambda: sequences.append(seq, [], [], stream=stream),
        "truncate": lambda: sequences.truncate(seq, 1, stream=stream),
    }.items():
        with Unchanged(cache), pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            f"{what}: the cache has recurrent layers, and their states follow an engine only. Pin the sequence, and run it."
        )
    assert handles(sequences) == before
    cache.set_active_batch_size(0, stream=stream)
    sequences.destroy_all_sequences()
    for empty in [sequences.create_sequence() for _ in range(B + 1)]:
        sequences.get(empty, stream=stream)
    assert (sequences.num_sequences, sequences.memory_swapped) == (B + 1, 0)
    cache.close()


def test_a_hybrid_of_one_kind_of_layers(memory, stream):
    with HybridCacheManager(HybridCacheConfig(layer_types=[ATTENTION] * 3, kv=cache_kv_config()), memory=memory) as cache:
        sequences = SequenceCacheManager(cache)
        seq, new = sequences.create_sequence(), tokens(cache, 2, 0)
        sequences.append(seq, *new, stream=stream)
        assert raw(sequences.get(seq, stream=stream)) == raw(new)
    with HybridCacheManager(HybridCacheConfig(layer_types=[MAMBA] * 2, mamba=mamba_config()), memory=memory) as cache:
        sequences = SequenceCacheManager(cache)
        assert (sequences.get(sequences.create_sequence(), stream=stream), sequences.dtype) == (([], []), None)
        assert sequences.memory_capacity == B * STATES


def put(into: Image, slot: int, source: Image, source_slot: int, count: int) -> None:
    for rows, other in zip(into.rows, source.rows, strict=True):
        rows[slot, :, :, :count] = other[source_slot, :, :, :count]
    for state, other in zip(into.states, source.states, strict=True):
        state[slot] = other[source_slot]


def test_in_an_active_slot_the_lengths_are_those_of_the_cache(memory, stream):
    cache, sequences = make("manager", memory)
    a, b = sequences.create_sequence(), sequences.create_sequence()
    parts = [tokens(cache, 2, seed) for seed in range(3)]
    sequences.append(a, *parts[0], stream=stream)
    assert sequences.pin(a, stream=stream) == 4
    sequences.append(a, *parts[1], stream=stream)
    assert sequences.length(a) == 4
    cache.reset_for_new_sequences([1, 1, 1, 0, 4], stream=stream)  # b, which is empty, is run too
    assert (sequences.length(a), sequences.length(b)) == (4, 0)
    sequences.append(a, *parts[2], stream=stream)
    sequences.append(b, *parts[2], stream=stream)
    sequences.truncate(a, 5, stream=stream)
    assert cache.host_kv_cache_lengths == (1, 1, 1, 2, 5)
    assert cache.kv_cache_lengths.numpy().tolist() == [1, 1, 1, 2, 5]
    assert raw(sequences.get(a, stream=stream)) == raw(first(joined(*parts), 5))
    with pytest.raises(CapacityError) as caught:
        sequences.unpin(b, stream=stream)
    assert str(caught.value) == (
        "sequence 1 is in active slot 3, and no other slot is free. Shrink the active batch, or enable swapping. Nothing was changed."
    )
    cache.commit_sequence_length(1, stream=stream)
    ones = memory.to_device(np.ones(5, np.int32), stream=stream)
    cache.commit_sequence_length(ones, max_increment=1, stream=stream)
    with pytest.raises(LengthsUnknown):
        sequences.length(a)
    cache.set_active_batch_size(2, stream=stream)
    assert sequences.length(a) == 7, "the device knows, though the slot is not active any more"
    sequences.unpin(a, stream=stream)
    sequences.truncate(a, 5, stream=stream)
    assert raw(sequences.get(a, stream=stream)) == raw(first(joined(*parts), 5))
    assert sequences.length(b) == 4, "it was seen in an active slot"
    assert (sequences.pin(a, stream=stream), sequences.pin(a, slot=4, stream=stream)) == (4, 4)
    cache.reset_for_new_sequences([0, 0, 0, 3], stream=stream)
    cache.set_active_batch_size(5, stream=stream)
    assert (sequences.length(a), sequences.length(b)) == (0, 3), "whoever runs a pinned sequence may start it anew"
    cache.clear_slot(3, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    assert (sequences.length(a), sequences.length(b)) == (0, 0)
    cache.close()


def test_tokens_that_nobody_looked_at(memory, stream):
    """They were committed while a sequence was in an active slot; then the slot is not active any more."""
    cache, sequences = make("manager", memory, swapping=True)
    seq = sequences.create_sequence()
    fill_all(cache, stream)
    cache.set_active_batch_size(5, stream=stream)
    cache.commit_sequence_length(3, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    assert sequences.length(seq) == 3
    cache.reset_for_new_sequences([0, 0, 0, 0, 3], stream=stream)
    cache.commit_sequence_length(1, stream=stream)
    cache.compact_batch([-1, 0, 1, -1, -1], 5, 2, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    assert sequences.length(seq) == 4
    sequences.pin(seq, stream=stream)
    cache.reset_for_new_sequences([0, 0, 0, 0, 4], stream=stream)
    cache.commit_sequence_length(1, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    assert sequences.length(seq) == 5
    sequences.unpin(seq, stream=stream)
    cache.reset_for_new_sequences([0, 0, 0, 0, 5], stream=stream)
    assert sequences.length(seq) == 5
    cache.commit_sequence_length(1, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    expected = [(rows[4, which, :, :6].tobytes()) for rows in Image(cache).rows for which in (0, 1)]
    for other in [sequences.create_sequence() for _ in range(B)]:
        sequences.get(other, stream=stream)
    assert sequences.memory_swapped == 6 * TOKEN["manager"]
    assert [layer.tobytes() for pair in zip(*sequences.get(seq, stream=stream), strict=True) for layer in pair] == expected
    slot = sequences.pin(seq, stream=stream)
    sequences.unpin(seq, stream=stream)
    cache.reset_for_new_sequences([0] * slot + [6], stream=stream)
    cache.reset_for_new_sequences([0] * B, stream=stream)
    cache.set_active_batch_size(0, stream=stream)
    cache.set_active_batch_size(B, stream=stream)
    assert sequences.length(seq) == 0
    cache.close()


class LateMemory(HostMemory):
    """As late as a device may be: what is copied from or to the host is copied when the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Any] = []

    def upload(self, destination: Any, source: Any, *, stream: Any) -> None:
        self.late.append(lambda: HostMemory.upload(self, destination, source, stream=stream))

    def download(self, destination: Any, source: Any, *, stream: Any) -> None:
        self.late.append(lambda: HostMemory.download(self, destination, source, stream=stream))

    def synchronize(self, stream: Any) -> None:
        while self.late:
            self.late.pop(0)()


def test_host_arrays_are_waited_for():
    memory = LateMemory()
    stream = memory.create_stream()
    cache, sequences = make("manager", memory, swapping=True)
    seq, new = sequences.create_sequence(), tokens(cache, 2, 0)
    expected = raw(new)
    sequences.append(seq, *new, stream=stream)
    for array in (*new[0], *new[1]):
        array[...] = 0
    assert raw(sequences.get(seq, stream=stream)) == expected
    for other in [sequences.create_sequence() for _ in range(B)]:
        sequences.pin(other, stream=stream)
        assert not memory.late
    assert raw([[*sequences._table.find(seq).saved.rows]]) == [expected[i] for i in (0, 3, 1, 4, 2, 5)]
    sequences.unpin(other, stream=stream)
    assert (sequences.pin(seq, stream=stream), memory.late) == (4, [])
    cache.close()


def test_a_sequence_follows_its_slot(memory, stream):
    cache, sequences = make("manager", memory)
    cache.reset_for_new_sequences([0] * B, stream=stream)
    ids = []
    for slot in range(B):
        cache.set_active_batch_size(slot + 1, stream=stream) if slot else cache.reset_for_new_sequences([0], stream=stream)
        ids.append(sequences.create_sequence() if slot < B - 1 else None)
        if ids[slot] is not None:
            sequences.pin(ids[slot], slot=slot, stream=stream)
            sequences.append(ids[slot], *tokens(cache, slot + 1, slot), stream=stream)
    a, b, c, d, _ = ids
    cache.compact_batch([1, -1, 0, -1, 2], 5, 3, stream=stream)
    assert (sequences.length(a), sequences.length(c)) == (1, 3)
    for seq in (a, c):
        assert raw(sequences.get(seq, stream=stream)) == raw(tokens(cache, seq + 1, seq))
    assert raw(sequences.get(d, stream=stream)) == raw(tokens(cache, 4, d)), "dropped, but not overwritten"
    taken = "its slot was taken by whoever runs the cache, and its tokens are gone. Pin sequences, or leave their slots inactive."
    with pytest.raises(SequenceError) as caught:
        sequences.length(b)
    assert str(caught.value) == f"sequence {b}: {taken}"
    sequences.destroy_sequence(b)
    with pytest.raises(SequenceError, match=f"^sequence {b}: it was destroyed"):
        sequences.destroy_sequence(b)

    identity = memory.to_device(np.arange(3, dtype=np.int32), stream=stream)
    cache.compact_batch(identity, 3, 3, stream=stream)
    cache.sync_lengths(stream=stream)
    assert sequences.length(a) == 1
    cache.compact_batch(memory.to_device(np.array([0, -1, 1], np.int32), stream=stream), 3, 2, stream=stream)
    for seq in (a, c):
        with pytest.raises(SequenceError, match="taken"):
            sequences.get(seq, stream=stream)
    sequences.unpin(d, stream=stream)
    cache.set_active_batch_size(3, stream=stream)
    assert sequences.num_sequences == 1
    cache.set_active_batch_size(4, stream=stream)  # of which d waits in the last
    with pytest.raises(SequenceError, match="taken"):
        sequences.length(d)
    sequences.destroy_all_sequences()
    with pytest.raises(SequenceError, match="destroyed"):
        sequences.length(d)
    cache.close()


@pytest.mark.parametrize("swapping", [False, True])
def test_into_a_certain_slot(memory, stream, swapping):
    cache, sequences = make("manager", memory, swapping=swapping)
    cache.reset_for_new_sequences([0, 2], stream=stream)
    a, b, c = (sequences.create_sequence() for _ in range(3))  # in slots 4, 3, 2
    for seq in (a, b, c):
        sequences.append(seq, *tokens(cache, seq + 1, seq), stream=stream)
    where = lambda: [entry.slot for entry in sorted(sequences._table, key=lambda entry: entry.id)]  # noqa: E731

    def refused(seq: int, slot: int, text: str) -> None:
        before = handles(sequences)
        with Unchanged(cache), pytest.raises(CapacityError) as caught:
            sequences.pin(seq, slot=slot, stream=stream)
        assert str(caught.value) == f"{text} Nothing was changed."
        assert handles(sequences) == before

    assert (sequences.pin(a, slot=2, stream=stream), where()) == (2, [2, 3, 4])  # c goes where a was
    refused(b, 2, f"slot 2 holds sequence {a}, which is active or pinned.")
    refused(b, 1, "slot 1 is active and not empty. Clear it before.")
    assert (sequences.pin(a, slot=0, stream=stream), where()) == (0, [0, 3, 4])
    assert cache.host_kv_cache_lengths == (1, 2)
    refused(b, 0, f"slot 0 holds sequence {a}, which is active or pinned.")
    d = sequences.create_sequence()
    if swapping:  # from an active slot, which is not free for c
        assert (sequences.pin(a, slot=4, stream=stream), where()) == (4, [4, 3, None, 2])
        assert sequences.memory_swapped == 3 * TOKEN["manager"]
    else:
        refused(a, 4, f"sequence {c} must leave slot 4, and no other is free.")
        sequences.destroy_sequence(d)
        assert (sequences.pin(a, slot=4, stream=stream), where()) == (4, [4, 3, 2])
    assert cache.host_kv_cache_lengths == (1, 2), "the slot that it left is its runner's"
    for seq in (a, b, c):
        assert raw(sequences.get(seq, stream=stream)) == raw(tokens(cache, seq + 1, seq))
    cache.close()


def test_beside_a_session():
    """A session goes on as ever, beside sequences, and on a sequence that it is given."""
    memory = RecordingMemory(Journal())
    kv = kv_config(slots=3)
    with InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory)) as session:
        stream, sequences = memory.create_stream(), SequenceCacheManager(session.cache, enable_swapping=True)
        prompts = [[3, 1, 4], [1, 5]]
        seq, other = sequences.create_sequence(), sequences.create_sequence()
        sequences.append(seq, *tokens(session.cache, 4, 7), stream=stream)
        sequences.append(other, *tokens(session.cache, 2, 8), stream=stream)
        sequences.destroy_sequence(other)
        logits = session.prefill(prompts)
        assert np.array_equal(logits, [logits_after(prompt) for prompt in prompts])
        sequences.get(seq, stream=stream)
        assert np.array_equal(session.decode([2, 6]), [logits_after([3, 1, 4, 2]), logits_after([1, 5, 6])])
        assert raw(sequences.get(seq, stream=stream)) == raw(tokens(session.cache, 4, 7))
        session.prefill([*prompts, [9]])
        with pytest.raises(SequenceError, match="taken"):
            sequences.get(seq, stream=stream)
        with pytest.raises(CapacityError, match="All are active or pinned"):
            sequences.create_sequence()


def test_what_is_refused_changes_nothing(memory, stream):
    cache, sequences = make("manager", memory, swapping=True)
    fill_all(cache, stream)
    cache.reset_for_new_sequences([1], stream=stream)
    seqs = [sequences.create_sequence() for _ in range(5)]
    seq, gone = seqs[0], sequences.create_sequence()
    sequences.destroy_sequence(gone)
    for number in seqs:
        sequences.append(number, *tokens(cache, 4, number), stream=stream)
    keys, values = tokens(cache, 2, 1)
    four, wrong = tokens(cache, 4, 1), "[num_kv_heads, n, head_dim]"
    append: list[tuple[Any, Any, type[Exception], str]] = [
        (*four, CapacityError, "sequence 0 holds 4 tokens; appending 4 more exceeds max_sequence_length=7. Nothing was changed."),
        (keys[:2], values, ShapeError, "keys: expected 3 layers, got 2."),
        (keys, [*values, values[0]], ShapeError, "values: expected 3 layers, got 4."),
        (3, values, ShapeError, "keys: expected an array [L, H, n, D], or an array [H, n, D] per layer, got int."),
        (np.array(3), values, ShapeError, "keys: expected an array [L, H, n, D], or an array [H, n, D] per layer, got ndarray."),
        (keys, "abc", ShapeError, "values: expected an array [L, H, n, D], or an array [H, n, D] per layer, got str."),
        (keys, [values[0], values[1], [1]], ShapeError, "values[2]: expected an array [H, n, D], got list."),
        ([np.float32(keys[0]), *keys[1:]], values, DTypeError, "keys[0]: expected float16, which the cache stores, got float32."),
        (keys, [*values[:2], values[2].view(np.int16)], DTypeError, "values[2]: expected float16, which the cache stores, got int16."),
        (keys, four[1], ShapeError, f"values[0]: expected {wrong} = (2, 2, 16), got (2, 4, 16)."),
        (keys[::-1], values, ShapeError, f"keys[0]: expected {wrong} = (2, 2, 16), got (3, 2, 16)."),
        ([keys[0][0], *keys[1:]], values, ShapeError, f"keys[0]: expected {wrong} = (2, 0, 16), got (2, 16)."),
        (keys, [values[0], values[1][:, :, :24], values[2]], ShapeError, f"values[1]: expected {wrong} = (1, 2, 48), got (1, 2, 24)."),
    ]
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda k=k, v=v: sequences.append(seq, k, v, stream=stream), error, text) for k, v, error, text in append
    ]
    for length in (-1, 5):
        text = f"truncate: sequence 0 holds 4 tokens; expected 0 to 4, got {length}."
        cases.append((lambda n=length: sequences.truncate(seq, n, stream=stream), RangeError, text))
    cases += [
        (lambda: sequences.truncate(seq, 1.5, stream=stream), RangeError, "new_length: expected an integer, got 1.5."),
        (lambda: sequences.reserve(-1), RangeError, "num_sequences: expected at least 0, got -1."),
        (lambda: sequences.pin(seq, slot=5, stream=stream), SlotError, "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
        (lambda: sequences.pin(seq, slot=-1, stream=stream), SlotError, "slot -1: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
    ]
    calls = {
        "append": lambda number, on: sequences.append(number, keys, values, stream=on),
        "get": lambda number, on: sequences.get(number, stream=on),
        "truncate": lambda number, on: sequences.truncate(number, 0, stream=on),
        "pin": lambda number, on: sequences.pin(number, stream=on),
        "unpin": lambda number, on: sequences.unpin(number, stream=on),
        "length": lambda number, on: sequences.length(number),
        "destroy_sequence": lambda number, on: sequences.destroy_sequence(number),
    }
    unknown = "expected an id that create_sequence returned."
    for number, text in (
        (gone, f"sequence {gone}: it was destroyed."),
        (6, f"sequence 6: {unknown}"),
        (-1, f"sequence -1: {unknown}"),
        ("a", "sequence: expected an integer, got 'a'."),
        (True, "sequence: expected an integer, got True."),
        (None, "sequence: expected an integer, got None."),
    ):
        cases += [(lambda call=call, n=number: call(n, stream), SequenceError, text) for call in calls.values()]
    before = handles(sequences)
    for call, error, text in cases:
        with Unchanged(cache), pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text
    for name in ("append", "get", "truncate", "pin", "unpin"):
        with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
            calls[name](seq, None)
    assert handles(sequences) == before
    assert isinstance(caught.value, KVCacheError)
    sequences.pin(seq, slot=4, stream=stream)
    sequences.get(seqs[-1], stream=stream)
    assert sequences.memory_swapped > 0
    sequences.close()
    sequences.close()
    assert (sequences.num_sequences, sequences.memory_swapped) == (0, 0)
    last: list[Any] = [call for call, error, _ in cases if error is SequenceError]
    for call in (*last, sequences.create_sequence, sequences.destroy_all_sequences, lambda: sequences.reserve(0), sequences.__enter__):
        with pytest.raises(ClosedError, match=r"^this SequenceCacheManager is closed\.$"):
            call()
    again = SequenceCacheManager(cache)
    cache.close()
    with pytest.raises(ClosedError, match=r"^this SequenceCacheManager's cache is closed\.$"):
        again.create_sequence()


def test_how_it_may_be_made(memory):
    cache = make_cache("manager", memory)
    kinds = "expected a KVCacheManager, LinearKVCache or HybridCacheManager, got"
    for arguments, options, text in (
        ((make_cache("mamba", memory),), {}, f"SequenceCacheManager: {kinds} MambaCacheManager."),
        ((memory,), {}, f"SequenceCacheManager: {kinds} {type(memory).__name__}."),
        ((cache,), {"enable_swapping": 1}, "enable_swapping: expected True or False, got 1."),
        ((cache,), {"swap_threshold": 0}, "swap_threshold: expected a number above 0 and at most 1, got 0."),
        ((cache,), {"swap_threshold": 1.5}, "swap_threshold: expected a number above 0 and at most 1, got 1.5."),
        ((cache,), {"swap_threshold": True}, "swap_threshold: expected a number above 0 and at most 1, got True."),
        ((cache,), {"swap_threshold": "1"}, "swap_threshold: expected a number above 0 and at most 1, got '1'."),
    ):
        with pytest.raises(ConfigError) as caught:
            SequenceCacheManager(*arguments, **options)
        assert str(caught.value) == text
    sequences = SequenceCacheManager(cache)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="SequenceCacheManager owns device memory and cannot be copied"):
            copier(sequences)
    assert sequences.cache is cache


def test_nothing_of_it_is_captured_in_a_graph():
    memory = CapturingMemory()
    stream = memory.create_stream()
    cache, sequences = make("manager", memory)
    seq = sequences.create_sequence()
    memory.capturing = True
    arguments = {"append": tokens(cache, 1, 0), "get": (), "truncate": (0,), "pin": (), "unpin": ()}
    for name, values in arguments.items():
        with Unchanged(cache), pytest.raises(CaptureError, match=f"^{name} cannot be captured: it waits for the device"):
            getattr(sequences, name)(seq, *values, stream=stream)


def three_swaps(memory: Any, stream: Any) -> tuple[Any, Any, list[Any]]:
    """Three sequences of four tokens past the threshold, of which the calls that are returned send one or two out."""
    cache, sequences = make("manager", memory, swapping=True, threshold=12 / 35)
    cache.reset_for_new_sequences([0], stream=stream)
    ids = [sequences.create_sequence() for _ in range(3)]
    for seq in ids:
        sequences.append(seq, *tokens(cache, 4, seq), stream=stream)
    assert sequences.memory_swapped == 0
    more = tokens(cache, 3, 9)
    return (
        cache,
        sequences,
        [
            lambda: sequences.append(ids[0], *more, stream=stream),
            lambda: sequences.pin(ids[2], slot=3, stream=stream),
            lambda: (sequences.pin(ids[2], slot=0, stream=stream), sequences.unpin(ids[2], stream=stream)),
        ],
    )


def test_no_room_on_the_host():
    class Full(HostMemory):
        left = 99

        def staging(self, shape: Any, dtype: str) -> np.ndarray:
            self.left -= 1
            if self.left < 0:
                raise CapacityError("no room.")
            return super().staging(shape, dtype)

    memory = Full()
    stream = memory.create_stream()
    for which, count in ((0, 1), (1, 2), (2, 1)):
        for n in range(count):
            cache, sequences, calls = three_swaps(memory, stream)
            memory.left = n
            before = handles(sequences)
            with Unchanged(cache), pytest.raises(CapacityError, match=r"^no room\.$"):
                calls[which]()
            assert handles(sequences) == before
            memory.left = 99
            calls[which]()
            assert [raw(sequences.get(seq, stream=stream)) for seq in (1, 2)] == [raw(tokens(cache, 4, seq)) for seq in (1, 2)]
            cache.close()


@needs_standin
def test_page_locked_memory_is_all_that_swapping_allocates(memory, stream):
    cache, sequences, calls = three_swaps(memory, stream)
    standin = StandIn()
    before = handles(sequences)
    standin.fail_allocation(1)
    with Unchanged(cache), pytest.raises(CapacityError, match="page-locked host memory"):
        calls[0]()
    assert handles(sequences) == before
    standin.take_calls()
    calls[0]()
    assert [call for call in standin.take_calls() if call in ALLOCATIONS] == ["cuMemAllocHost_v2"]
    assert standin.page_locked_nbytes == sequences.memory_swapped == 4 * TOKEN["manager"]
    assert raw(sequences.get(1, stream=stream)) == raw(tokens(cache, 4, 1))
    sequences.destroy_all_sequences()
    assert (standin.page_locked_nbytes, standin.device_nbytes) == (0, 0)
    cache.close()


SEQS = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["create", "create", "compact"])),
    st.tuples(st.sampled_from(["append", "truncate"]), SEQS, st.integers(0, 4)),
    st.tuples(st.sampled_from(["append", "get", "pin", "unpin", "destroy"]), SEQS, st.just(1)),
    st.tuples(st.just("run"), SEQS, st.integers(0, 2)),
)


class Program:
    """Operations on sequences beside what they should hold: lists of keys and values, without slots."""

    def __init__(self, memory: Any, layout: KVLayout) -> None:
        layers = [KVLayerConfig(num_kv_heads=h, head_dim=d) for h, d in ((2, 16), (1, 8))]
        self.cache = KVCacheManager(KVCacheConfig(layers=layers, max_batch_size=3, max_sequence_length=S, layout=layout), memory=memory)
        self.sequences = SequenceCacheManager(self.cache, enable_swapping=True, swap_threshold=0.7)
        self.stream = memory.create_stream()
        self.held: dict[int, Any] = {}
        self.seed = 0

    def run(self, operation: str, which: int = 0, count: int = 0) -> None:
        self.seed += 1
        ids = list(self.held)
        if operation != "create" and not ids:
            return
        seq = ids[which % len(ids)] if ids else 0
        with suppress(CapacityError):  # then everything must still be there
            getattr(self, f"do_{operation}")(seq, count)
        assert self.sequences.num_sequences == len(self.held)
        for number, pair in self.held.items():
            assert self.sequences.length(number) == pair[0][0].shape[1]

    def do_create(self, _: int, __: int) -> None:
        self.held[self.sequences.create_sequence()] = tokens(self.cache, 0, 0)

    def do_append(self, seq: int, count: int) -> None:
        new = tokens(self.cache, count, self.seed)
        self.sequences.append(seq, *new, stream=self.stream)
        self.held[seq] = joined(self.held[seq], new)

    def do_truncate(self, seq: int, count: int) -> None:
        count = min(count, self.held[seq][0][0].shape[1])
        self.sequences.truncate(seq, count, stream=self.stream)
        self.held[seq] = first(self.held[seq], count)

    def do_get(self, seq: int, _: int) -> None:
        assert raw(self.sequences.get(seq, stream=self.stream)) == raw(self.held[seq])

    def do_pin(self, seq: int, _: int) -> None:
        self.sequences.pin(seq, stream=self.stream)

    def do_unpin(self, seq: int, _: int) -> None:
        self.sequences.unpin(seq, stream=self.stream)

    def do_run(self, seq: int, slot: int) -> None:
        """Make room for it at the front, and bring it in there."""
        if self.cache.active_batch_size == 0 and all(entry.slot != 0 for entry in self.sequences._table):
            self.cache.set_active_batch_size(1, stream=self.stream)
        self.sequences.pin(seq, slot=slot, stream=self.stream)

    def do_compact(self, _: int, __: int) -> None:
        """End the batch: its sequences stay where they are, or were taken along before."""
        self.cache.compact_batch([-1] * self.cache.active_batch_size, self.cache.active_batch_size, 0, stream=self.stream)

    def do_destroy(self, seq: int, _: int) -> None:
        self.sequences.destroy_sequence(seq)
        del self.held[seq]


@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@settings(settings.default, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(OPERATIONS, max_size=30))
@example([("create",)] * 4 + [("append", seq, 4) for seq in range(4)] + [("run", 0, 0), ("append", 0, 2), ("compact",), ("unpin", 0, 1)])
def test_random_programs(memory, layout, program):
    run = Program(memory, layout)
    for operation in [("create",), ("create",), ("append", 1, 3), ("create",), ("append", 2, 4), *program]:
        run.run(*operation)
    for seq in list(run.held):
        run.run("get", list(run.held).index(seq))
    run.cache.close()
