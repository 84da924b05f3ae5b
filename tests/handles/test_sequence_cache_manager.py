"""``SequenceCacheManager``: what a handle holds, and what is refused.

Which sequences are swapped out is in test_sequence_swapper.py, what becomes of one whose slot is run in test_sequence_table.py.
"""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

from tests.handles.sequences import STATES, TOKEN, Sequences, joined, make_sequences, raw, tokens
from tests.helpers.assertions import raises
from tests.helpers.caches import HEADS, B, CapturingMemory, Image, S, Unchanged, cache_holding, fill_all, make_cache
from trt_kvcache import SequenceCacheManager
from trt_kvcache.dtypes import numpy_dtype
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    PlaceError,
    RangeError,
    SequenceError,
    ShapeError,
    SlotError,
)

WITH_ROWS = pytest.mark.parametrize("kind", ["manager", "linear"])
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])


class TestCreate:
    def test_ids_count_up(self, make):
        _, sequences = make()
        assert [sequences.create_sequence() for _ in range(3)] == [0, 1, 2]

    def test_an_id_is_never_used_again(self, make):
        _, sequences = make()
        sequences.destroy_sequence(sequences.create_sequence())
        assert sequences.create_sequence() == 1

    def test_a_new_sequence_is_empty(self, make):
        _, sequences = make()
        seq = sequences.create_sequence()
        assert sequences.length(seq) == 0
        sequences.check(seq, 0)

    def test_sequences_are_counted(self, make):
        _, sequences = make()
        ids = [sequences.create_sequence() for _ in range(3)]
        sequences.destroy_sequence(ids[1])
        assert sequences.num_sequences == 2

    def test_without_swapping_there_are_as_many_as_slots(self, make):
        cache, sequences = make()
        cache.set_active_batch_size(2)
        for _ in range(B - 2):
            sequences.create_sequence()
        text = "create_sequence: expected 1 free slots, got 0 of 5. Destroy sequences, or enable swapping."
        sequences.refuses(CapacityError, text, sequences.create_sequence)

    def test_a_destroyed_sequence_makes_room(self, make):
        _, sequences = make()
        ids = [sequences.create_sequence() for _ in range(B)]
        sequences.destroy_sequence(ids[2])
        assert sequences.create_sequence() == B

    def test_with_swapping_there_are_more_than_slots(self, make):
        _, sequences = make(swapping=True)
        ids = sequences.new(*[1] * (2 * B))
        for seq in ids:
            sequences.check(seq, 1)

    @pytest.mark.parametrize(("swapping", "most"), [(False, B), (True, None)])
    def test_how_many_there_can_be(self, make, swapping, most):
        assert make(swapping=swapping)[1].max_sequences == most

    def test_reserve_says_whether_there_is_room(self, make):
        cache, sequences = make()
        cache.set_active_batch_size(3)
        sequences.create_sequence()
        sequences.reserve(0)
        sequences.reserve(1)
        text = "reserve: expected 2 free slots, got 1 of 5. Destroy sequences, or enable swapping."
        sequences.refuses(CapacityError, text, sequences.reserve, 2)

    def test_reserve_with_swapping_needs_one_slot(self, make):
        _, sequences = make(swapping=True)
        sequences.new(*[1] * B)
        sequences.reserve(100)

    def test_reserve_where_all_slots_are_active_or_pinned(self, make):
        cache, sequences = make(swapping=True)
        cache.set_active_batch_size(B - 1)
        sequences.pin(sequences.create_sequence())
        text = "expected 1 free slots, got 0 of 5. All are active or pinned."
        sequences.refuses(CapacityError, f"reserve: {text}", sequences.reserve, 1)
        sequences.refuses(CapacityError, f"create_sequence: {text}", sequences.create_sequence)

    def test_destroy_all(self, make):
        _, sequences = make(swapping=True)
        ids = sequences.new(*[1] * (B + 1))
        sequences.destroy_all_sequences()
        assert (sequences.num_sequences, sequences.memory_used, sequences.memory_swapped) == (0, 0, 0)
        for seq in ids:
            sequences.refuses(SequenceError, f"sequence {seq}: it was destroyed.", sequences.length, seq)


class TestAppend:
    @WITH_ROWS
    @DTYPES
    def test_what_is_appended_is_got_bit_for_bit(self, make, kind, dtype):
        cache, sequences = make(kind, states=False, dtype=dtype)
        seq = sequences.create_sequence()
        parts = [tokens(cache, count, seed) for seed, count in enumerate((3, 0, 2))]
        for part in parts:
            sequences.append(seq, *part)
        assert raw(sequences.get(seq)) == raw(joined(*parts))
        assert sequences.length(seq) == 5

    @WITH_ROWS
    def test_only_its_slot_is_written(self, make, stream, kind):
        cache, sequences = make(kind, states=False)
        fill_all(cache, stream)
        expected = Image(cache)
        pair = tokens(cache, 3, 1)
        sequences.append(sequences.create_sequence(), *pair)
        for layer, rows in enumerate(expected.rows):
            for which in (0, 1):
                rows[B - 1, which, :, :3] = pair[which][layer].view(np.uint8)
        expected.check(cache)

    def test_sequences_do_not_meet(self, make):
        _, sequences = make()
        ids = sequences.new(3, 0, S)
        for seq, count in zip(ids, (3, 0, S), strict=True):
            sequences.check(seq, count)

    @WITH_ROWS
    def test_a_full_sequence_takes_no_token_more(self, make, kind):
        cache, sequences = make(kind, states=False)
        (seq,) = sequences.new(S)
        sequences.append(seq, *tokens(cache, 0, 1))
        text = f"sequence {seq} holds 7 tokens; appending 1 more exceeds max_sequence_length=7. Nothing was changed."
        sequences.refuses(CapacityError, text, sequences.append, seq, *tokens(cache, 1, 1))
        sequences.check(seq, S)


@pytest.fixture
def linear(make):
    """A cache of equal layers without states, its sequences, and keys and values of three tokens, one array each."""
    cache, sequences = make("linear", states=False)
    return sequences, *tokens(cache, 3, 1)


class TestFormsOfAppend:
    """One array or one per layer, of any strides, on the host or on a device."""

    def check(self, sequences, keys, values, form):
        seq = sequences.create_sequence()
        sequences.append(seq, *form)
        assert raw(sequences.get(seq)) == raw((keys, values))

    def test_one_array_or_one_per_layer(self, linear):
        _, keys, values = linear
        self.check(*linear, (keys, list(values)))

    def test_arrays_with_gaps(self, linear):
        _, keys, values = linear
        wide = np.stack([keys, values], axis=-1)
        self.check(*linear, (wide[..., 0], wide[..., 1]))

    def test_tensors_on_the_device(self, linear, memory, stream):
        _, keys, values = linear
        form = memory.to_device(keys, stream=stream), [memory.to_device(layer, stream=stream) for layer in values]
        self.check(*linear, form)

    def test_page_locked_arrays_may_be_changed_as_soon_as_the_call_returns(self, linear, memory):
        sequences, keys, values = linear
        staged = [memory.staging(keys.shape, "float16") for _ in range(2)]
        staged[0][...], staged[1][...] = keys, values
        seq = sequences.create_sequence()
        sequences.append(seq, *staged)
        staged[0][...] = staged[1][...] = 0
        assert raw(sequences.get(seq)) == raw((keys, values))


class TestGet:
    def test_equal_layers_come_in_one_array(self, linear):
        sequences, keys, values = linear
        seq = sequences.create_sequence()
        sequences.append(seq, keys, values)
        got = sequences.get(seq)
        assert [(type(array), array.shape, array.dtype) for array in got] == [(np.ndarray, (2, 2, 3, 16), np.float16)] * 2

    def test_layers_that_differ_come_in_one_array_each(self, make):
        _, sequences = make()
        for arrays in sequences.get(*sequences.new(3)):
            assert [array.shape for array in arrays] == [(h, 3, d) for h, d in HEADS]

    @DTYPES
    def test_arrays_are_of_the_dtype_of_the_cache(self, make, dtype):
        _, sequences = make(dtype=dtype)
        keys, _ = sequences.get(*sequences.new(1))
        assert (sequences.dtype, keys[0].dtype) == (dtype, numpy_dtype(dtype))

    def test_arrays_are_copies(self, make):
        _, sequences = make()
        (seq,) = sequences.new(3)
        sequences.get(seq)[0][0][...] = 0
        sequences.check(seq, 3)

    def test_attention_layers_of_a_hybrid(self, memory, stream):
        with make_cache("attention", memory) as cache:
            sequences = Sequences(SequenceCacheManager(cache), stream)
            sequences.check(*sequences.new(2), 2)

    def test_states_alone_have_no_rows(self, memory, stream):
        with make_cache("states", memory) as cache:
            sequences = Sequences(SequenceCacheManager(cache), stream)
            assert (sequences.get(sequences.create_sequence()), sequences.dtype) == (([], []), None)


class TestTruncate:
    @pytest.mark.parametrize("length", [0, 2, 4])
    def test_the_first_tokens_stay(self, make, length):
        cache, sequences = make()
        (seq,) = sequences.new(4)
        sequences.truncate(seq, length)
        assert raw(sequences.get(seq)) == raw(joined(tokens(cache, 4, seq), count=length))

    def test_other_tokens_may_follow(self, make):
        cache, sequences = make()
        (seq,) = sequences.new(4)
        sequences.truncate(seq, 2)
        more = tokens(cache, 3, 9)
        sequences.append(seq, *more)
        assert raw(sequences.get(seq)) == raw(joined(joined(tokens(cache, 4, seq), count=2), more))

    @pytest.mark.parametrize("length", [-1, 5])
    def test_to_more_or_less_than_there_is(self, make, length):
        _, sequences = make()
        (seq,) = sequences.new(4)
        text = f"truncate: sequence 0 holds 4 tokens; expected 0 to 4, got {length}."
        sequences.refuses(RangeError, text, sequences.truncate, seq, length)

    def test_to_no_integer(self, make):
        _, sequences = make()
        (seq,) = sequences.new(4)
        sequences.refuses(RangeError, "new_length: expected an integer, got 1.5.", sequences.truncate, seq, 1.5)


class TestBytes:
    @pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
    def test_the_capacity_is_that_of_full_slots(self, make, kind):
        _, sequences = make(kind, states=False)
        assert sequences.memory_capacity == B * (S * TOKEN[kind] + (STATES if kind == "hybrid" else 0))

    def test_the_capacity_of_states_alone(self, memory):
        with make_cache("states", memory) as cache:
            assert SequenceCacheManager(cache).memory_capacity == B * STATES

    def test_sequences_use_the_bytes_of_their_tokens(self, make):
        _, sequences = make()
        sequences.new(4, 0, 3)
        assert sequences.memory_used == 7 * TOKEN["manager"]

    def test_active_slots_use_theirs_too(self, make):
        cache, sequences = make()
        sequences.new(4)
        cache.reset_for_new_sequences([0, 3])
        assert sequences.memory_used == 7 * TOKEN["manager"]

    def test_a_slot_with_tokens_uses_its_states(self, make):
        cache, sequences = make("hybrid")
        cache.reset_for_new_sequences([0, 3])
        assert sequences.memory_used == 3 * TOKEN["hybrid"] + STATES

    def test_swapped_bytes_are_on_the_host(self, make):
        _, sequences = make(swapping=True, threshold=0.5)  # of 35 tokens
        sequences.new(4, 7, 7)
        assert (sequences.memory_used, sequences.memory_swapped) == (14 * TOKEN["manager"], 4 * TOKEN["manager"])

    def test_the_memory_has_been_there_from_the_start(self, make, memory):
        _, sequences = make()
        before = memory.live_nbytes
        sequences.new(4, 7, 7)
        assert memory.live_nbytes == before


class TestRecurrentLayers:
    """Only an engine can advance states, and nothing can take them back."""

    TEXT = "the cache has recurrent layers, whose states only an engine can update. Pin the sequence and run it."

    @pytest.mark.parametrize("kind", ["linear", "hybrid"])
    def test_tokens_are_not_appended(self, make, kind):
        _, sequences = make(kind)
        seq = sequences.create_sequence()
        sequences.refuses(ConfigError, f"append: {self.TEXT}", sequences.append, seq, [], [])

    @pytest.mark.parametrize("kind", ["linear", "hybrid"])
    def test_tokens_are_not_cut_off(self, make, kind):
        _, sequences = make(kind)
        seq = sequences.create_sequence()
        sequences.refuses(ConfigError, f"truncate: {self.TEXT}", sequences.truncate, seq, 0)


WRONG, ONE = "expected [num_kv_heads, n, head_dim] =", "expected an array [L, H, n, D], or an array [H, n, D] per layer, got"
#: Of layers (2, 16), (1, 48), (3, 16): what is given in place of keys and values of two tokens.
BAD_ROWS = {
    "too many tokens": (
        lambda k, v, four: four,
        CapacityError,
        "sequence 0 holds 4 tokens; appending 4 more exceeds max_sequence_length=7. Nothing was changed.",
    ),
    "a layer too few": (lambda k, v, four: (k[:2], v), ShapeError, "keys: expected 3 layers, got 2."),
    "a layer too many": (lambda k, v, four: (k, [*v, v[0]]), ShapeError, "values: expected 3 layers, got 4."),
    "an array without dimensions": (lambda k, v, four: (np.array(3), v), ShapeError, f"keys: {ONE} ndarray."),
    "a text": (lambda k, v, four: (k, "abc"), ShapeError, f"values: {ONE} str."),
    "a number": (lambda k, v, four: (3, v), ShapeError, f"keys: {ONE} int."),
    "a list as a layer": (lambda k, v, four: (k, [v[0], v[1], [1]]), ShapeError, "values[2]: expected an array [H, n, D], got list."),
    "another float": (
        lambda k, v, four: ([np.float32(k[0]), *k[1:]], v),
        DTypeError,
        "keys[0]: expected float16, which the cache stores, got float32.",
    ),
    "another dtype of the same size": (
        lambda k, v, four: (k, [*v[:2], v[2].view(np.int16)]),
        DTypeError,
        "values[2]: expected float16, which the cache stores, got int16.",
    ),
    "more values than keys": (lambda k, v, four: (k, four[1]), ShapeError, f"values[0]: {WRONG} (2, 2, 16), got (2, 4, 16)."),
    "layers in another order": (lambda k, v, four: (k[::-1], v), ShapeError, f"keys[0]: {WRONG} (2, 2, 16), got (3, 2, 16)."),
    "a dimension too few": (lambda k, v, four: ([k[0][0], *k[1:]], v), ShapeError, f"keys[0]: {WRONG} (2, 0, 16), got (2, 16)."),
    "another head dim": (
        lambda k, v, four: (k, [v[0], v[1][:, :, :24], v[2]]),
        ShapeError,
        f"values[1]: {WRONG} (1, 2, 48), got (1, 2, 24).",
    ),
}
#: Every call on a sequence, with the rest of its arguments.
CALLS = {"append": 2, "get": 0, "truncate": 1, "pin": 0, "unpin": 0, "length": 0, "destroy_sequence": 0}
EACH_CALL = pytest.mark.parametrize("name", CALLS)
WITH_STREAM = pytest.mark.parametrize("name", [name for name in CALLS if name not in ("length", "destroy_sequence")])


def arguments_of(cache, name):
    """What a call takes besides the sequence."""
    return {"append": tokens(cache, 1, 9), "truncate": (0,)}.get(name, ())


class TestRefused:
    @pytest.mark.parametrize(("form", "error", "text"), BAD_ROWS.values(), ids=BAD_ROWS)
    def test_keys_and_values(self, make, form, error, text):
        cache, sequences = make()
        (seq,) = sequences.new(4)
        sequences.refuses(error, text, sequences.append, seq, *form(*tokens(cache, 2, 1), tokens(cache, 4, 1)))

    @EACH_CALL
    def test_a_destroyed_sequence(self, make, name):
        cache, sequences = make()
        gone = sequences.create_sequence()
        sequences.destroy_sequence(gone)
        text = f"sequence {gone}: it was destroyed."
        sequences.refuses(SequenceError, text, getattr(sequences, name), gone, *arguments_of(cache, name))

    @EACH_CALL
    @pytest.mark.parametrize("seq", [1, -1])
    def test_an_unknown_sequence(self, make, name, seq):
        cache, sequences = make()
        sequences.create_sequence()
        text = f"sequence {seq}: expected an id that create_sequence returned."
        sequences.refuses(SequenceError, text, getattr(sequences, name), seq, *arguments_of(cache, name))

    @EACH_CALL
    @pytest.mark.parametrize("seq", ["a", True, None, 0.0])
    def test_what_is_no_id(self, make, name, seq):
        cache, sequences = make()
        sequences.create_sequence()
        text = f"sequence: expected an integer, got {seq!r}."
        sequences.refuses(SequenceError, text, getattr(sequences, name), seq, *arguments_of(cache, name))

    @pytest.mark.parametrize("slot", [B, -1])
    def test_slots_out_of_range(self, make, slot):
        _, sequences = make()
        seq = sequences.create_sequence()
        text = f"slot {slot}: expected 0 <= slot < 5 (batch slots). Slots never wrap."
        sequences.refuses(SlotError, text, partial(sequences.pin, slot=slot), seq)

    def test_fewer_than_no_sequences(self, make):
        _, sequences = make()
        sequences.refuses(RangeError, "num_sequences: expected at least 0, got -1.", sequences.reserve, -1)

    @WITH_STREAM
    def test_what_is_no_stream(self, make, name):
        cache, sequences = make()
        (seq,) = sequences.new(2)
        with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
            getattr(sequences, name)(seq, *arguments_of(cache, name), stream=None)

    @WITH_STREAM
    def test_while_a_stream_is_captured(self, name):
        memory = CapturingMemory()
        cache, sequences = make_sequences(memory, memory.create_stream())
        seq = sequences.create_sequence()
        memory.capturing = True
        with Unchanged(cache), pytest.raises(CaptureError, match=f"^{name} cannot be captured: it waits for the device"):
            getattr(sequences, name)(seq, *arguments_of(cache, name))

    def test_a_slot_with_two_buffers_of_states_does_not_leave_the_batch_in_a_capture(self):
        memory = CapturingMemory()
        cache, sequences = make_sequences(memory, memory.create_stream(), "hybrid", ping_pong=True)
        sequences.create_sequence()
        cache.reset_for_new_sequences([0] * B)
        cache.commit_sequence_length(1)
        memory.capturing = True
        with Unchanged(cache), pytest.raises(CaptureError, match=r"^keep_states cannot be captured: a graph keeps nothing"):
            cache.set_active_batch_size(B - 1)


class TestLife:
    def test_close_forgets_all_sequences(self, make):
        _, sequences = make(swapping=True)
        sequences.new(*[1] * (B + 1))
        sequences.close()
        assert (sequences.closed, sequences.num_sequences, sequences.memory_swapped) == (True, 0, 0)

    def test_close_may_be_called_again(self, make):
        _, sequences = make()
        sequences.close()
        sequences.close()
        assert sequences.closed

    def test_close_leaves_the_cache_open(self, make):
        cache, sequences = make()
        with Unchanged(cache):
            sequences.close()
        cache.set_active_batch_size(1)

    @EACH_CALL
    def test_calls_on_a_closed_one(self, make, name):
        cache, sequences = make()
        (seq,) = sequences.new(1)
        sequences.close()
        with pytest.raises(ClosedError, match=r"^this SequenceCacheManager is closed\.$"):
            getattr(sequences, name)(seq, *arguments_of(cache, name))

    @pytest.mark.parametrize(
        ("name", "arguments"), [("create_sequence", ()), ("destroy_all_sequences", ()), ("reserve", (0,)), ("__enter__", ())]
    )
    def test_other_calls_on_a_closed_one(self, make, name, arguments):
        _, sequences = make()
        sequences.close()
        with pytest.raises(ClosedError, match=r"^this SequenceCacheManager is closed\.$"):
            getattr(sequences, name)(*arguments)

    def test_over_a_closed_cache(self, make):
        cache, sequences = make()
        cache.close()
        with pytest.raises(ClosedError, match=r"^this SequenceCacheManager's cache is closed\.$"):
            sequences.create_sequence()

    @pytest.mark.parametrize("operation", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_it_is_never_copied(self, memory, operation):
        sequences = SequenceCacheManager(make_cache("manager", memory))
        with pytest.raises(TypeError, match=r"^a SequenceCacheManager owns memory, or shares it, and cannot be copied or pickled\.$"):
            operation(sequences)


class TestConstruction:
    def test_its_cache_is_the_one_that_was_given(self, memory):
        cache = make_cache("manager", memory)
        assert SequenceCacheManager(cache).cache is cache

    def test_a_cache_without_whole_sequences(self, memory):
        with pytest.raises(ConfigError) as caught:
            SequenceCacheManager(make_cache("mamba", memory))
        text = "SequenceCacheManager: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got MambaCacheManager."
        assert str(caught.value) == text

    def test_no_cache_at_all(self, memory):
        with raises(ConfigError, "SequenceCacheManager", got=type(memory).__name__):
            SequenceCacheManager(memory)

    def test_a_cache_is_under_one_at_a_time(self, memory):
        cache = make_cache("manager", memory)
        first = SequenceCacheManager(cache)
        with pytest.raises(ConfigError, match="expected a cache that no other SequenceCacheManager uses, got one in use"):
            SequenceCacheManager(cache)
        first.close()
        SequenceCacheManager(cache).close()

    def test_swapping_is_on_or_off(self, memory):
        with raises(ConfigError, "enable_swapping", expected="True or False", got=1):
            SequenceCacheManager(make_cache("manager", memory), enable_swapping=1)

    @pytest.mark.parametrize("threshold", [0, -0.5, 1.5, True, "1", float("nan")])
    def test_a_threshold_is_a_share(self, memory, threshold):
        with raises(ConfigError, "swap_threshold", expected="above 0 and at most 1", got=repr(threshold)):
            SequenceCacheManager(make_cache("manager", memory), swap_threshold=threshold)

    def test_tokens_that_are_there_belong_to_no_sequence(self, memory, stream):
        with cache_holding("manager", memory, stream, 3, 4) as cache:
            sequences = SequenceCacheManager(cache)
            assert (sequences.num_sequences, sequences.memory_used) == (0, 7 * TOKEN["manager"])
