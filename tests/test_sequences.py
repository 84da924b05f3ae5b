"""``SequenceCacheManager``: which rows and states a handle has, wherever they are, and what is refused. See test_random_programs."""

import copy
import inspect
import pickle
from functools import partial

import numpy as np
import pytest
from cache_cases import B, CapturingMemory, FailingMemory, Image, S, Unchanged, fill_all, make_cache, on_device
from simt.standin import ALLOCATIONS, StandIn, needs_standin

from trt_kvcache import SequenceCacheManager
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

#: Bytes of one token, and of the states of one slot, of the cases in float16.
TOKEN = {"manager": 2 * 2 * (2 * 16 + 48 + 3 * 16), "linear": 2 * 2 * 2 * (2 * 16), "hybrid": 2 * 2 * (2 * 16 + 48 + 3 * 16)}
STATES = 2 * (30 * 4 + 21 * 2)
TAKEN = "its slot was taken by whoever runs the cache, and its tokens are gone. Pin a sequence after its slot was made active."
#: How tokens are committed that the host knows, or not.
LIMIT = [{"max_increment": 1}, {}]


class On:
    """A manager whose calls are on one stream, if they do not say which."""

    def __init__(self, manager, stream):
        self._manager, self._stream = manager, stream

    @property
    def __class__(self):
        return type(self._manager)

    def __getattr__(self, name):
        value = getattr(self._manager, name)
        takes = inspect.ismethod(value) and "stream" in inspect.signature(value).parameters
        return partial(value, stream=self._stream) if takes else value


class Sequences(On):
    """Whose tokens are random, by the id of a sequence."""

    def add(self, seq, count):
        self.append(seq, *tokens(self.cache, count, seq))

    def new(self, *counts):
        """Sequences of so many tokens, all created before any has some."""
        ids = [self.create_sequence() for _ in counts]
        for seq, count in zip(ids, counts, strict=True):
            self.add(seq, count)
        return ids

    def check(self, seq, count):
        assert raw(self.get(seq)) == raw(tokens(self.cache, count, seq))

    @property
    def slots(self):
        return [entry.slot for entry in sorted(self._table, key=lambda entry: entry.id)]

    def refuses(self, error, text, call, *arguments, **keywords):
        before = handles(self)
        with Unchanged(self.cache), pytest.raises(error) as caught:
            call(*arguments, **keywords)
        assert str(caught.value) == text
        assert handles(self) == before


def make(kind, memory, stream, *, states=True, swapping=False, threshold=1, **changes):
    changes |= {} if states or kind != "linear" else {"num_mamba_layers": 0}
    cache = make_cache(kind, memory, **changes)
    return On(cache, stream), Sequences(SequenceCacheManager(cache, enable_swapping=swapping, swap_threshold=threshold), stream)


def tokens(cache, count, seed):
    """Keys and values of new tokens as ``append`` takes them: any bits, NaN with a payload among them."""
    kv, pair = cache.kv_config, []
    size = numpy_dtype(kv.dtype).itemsize
    for which in (0, 1):
        draws = [np.random.default_rng(100 * seed + 10 * which + index) for index in range(len(kv.layers))]
        shapes = [(layer.num_kv_heads, count, layer.head_dim * size) for layer in kv.layers]
        pair.append([draw.integers(0, 256, shape, np.uint8).view(numpy_dtype(kv.dtype)) for draw, shape in zip(draws, shapes, strict=True)])
    return tuple(np.stack(arrays) if kv.is_uniform else arrays for arrays in pair)


def raw(pair):
    """K and V of each layer, in a form that compares bits."""
    return [(layer.shape, layer.tobytes()) for arrays in pair for layer in arrays]


def handles(sequences):
    """Everything that an operation could change in the table."""
    table = sequences._table
    entries = [(e.id, e.slot, e.length, e.pinned, e.saved and [a.tobytes() for a in (*e.saved.rows, *e.saved.states)]) for e in table]
    return entries, set(table._taken), sequences.memory_used, sequences.memory_swapped


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
        got = sequences.get(seq)
        assert raw(got) == raw((keys, values))
        got[0][...] = 0  # a copy
        assert raw(sequences.get(seq)) == raw((keys, values))
    assert (sequences.length(seq), sequences.num_sequences, sequences.dtype, got[1].dtype) == (3, 4, "float16", np.float16)


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


def test_the_one_used_longest_ago_goes_and_no_pinned_active_or_used_one(memory, stream):
    cache, sequences = make("manager", memory, stream, swapping=True)
    cache.reset_for_new_sequences([2])
    a, b, c, d = sequences.new(1, 1, 1, 1)
    assert sequences.slots == [4, 3, 2, 1]
    sequences.get(a)
    assert sequences.pin(b) == 3
    e = sequences.create_sequence()
    assert sequences.slots[e] is None
    sequences.get(e)
    assert sequences.slots == [4, 3, None, 1, 2]
    sequences.truncate(c, 1, stream=memory.create_stream())  # d makes way, and c is in another slot
    assert sequences.slots == [4, 3, 1, None, 2]
    for seq in (a, c, e):
        sequences.pin(seq)
    sequences.reserve(0)
    full = "expected 1 free slots, got 0 of 5. All are active or pinned."
    sequences.refuses(CapacityError, f"reserve: {full}", sequences.reserve, 1)
    sequences.refuses(CapacityError, f"create_sequence: {full}", sequences.create_sequence)
    text = f"sequence {d} has no slot, and all slots are active or pinned. Nothing was changed."
    sequences.refuses(CapacityError, text, sequences.get, d)
    for seq in (c, a):
        sequences.unpin(seq)
    assert sequences.pin(d) == 1
    sequences.check(c, 1)
    assert sequences.slots[a] is None
    sequences.check(d, 1)
    sequences.destroy_sequence(c)
    sequences.reserve(9)  # one slot is free, and enough
    cache.reset_for_new_sequences([1] * B)  # all of them are run now
    sequences.unpin(d)
    assert sequences._table.find(d).slot is None, "no slot is left for it but the host"


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


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_run_by_an_engine_put_away_with_its_states_and_run_again_elsewhere(memory, stream, kind, ping_pong):
    cache, sequences = make(kind, memory, stream, swapping=True, ping_pong=ping_pong)
    fill_all(cache, stream)
    expected = Image(cache)
    seq = sequences.create_sequence()
    cache.set_active_batch_size(2)
    assert sequences.pin(seq, slot=1) == 1
    expected.zero_states(0, 1)
    expected.check(cache)
    fill_all(cache, stream, 1)  # what an engine does
    cache.commit_sequence_length([0, 5])
    held = Image(cache)
    assert (sequences.length(seq), sequences.memory_used) == (5, 5 * TOKEN[kind] + (1 + ping_pong) * STATES)
    expected = Image(cache)
    sequences.unpin(seq)
    expected.move(4, held, 1, 5)
    for into, states in zip(expected.next_states, held.states, strict=True):  # others may be swapped while it waits
        into[4] = states[1]
    expected.check(cache)
    assert (cache.host_kv_cache_lengths, sequences.length(seq)) == ((0, 5), 5)
    cache.clear_slot(1)
    cache.swap()
    for _ in range(3):
        sequences.pin(sequences.create_sequence())
    assert sequences.memory_swapped == 5 * TOKEN[kind] + STATES
    fill_all(cache, stream, 2)
    expected = Image(cache)
    assert sequences.pin(seq, slot=0) == 0
    expected.move(0, held, 1, 5)
    expected.check(cache)
    assert (cache.host_kv_cache_lengths, sequences.memory_swapped) == ((5, 0), 0)
    text = "the cache has recurrent layers, and their states follow an engine only. Pin the sequence, and run it."
    sequences.refuses(ConfigError, f"append: {text}", sequences.append, seq, [], [])
    sequences.refuses(ConfigError, f"truncate: {text}", sequences.truncate, seq, 1)


def test_a_hybrid_of_one_kind_of_layers(memory, stream):
    with make_cache("attention", memory) as cache:
        sequences = Sequences(SequenceCacheManager(cache), stream)
        sequences.check(*sequences.new(2), 2)
    with make_cache("states", memory) as cache:
        sequences = Sequences(SequenceCacheManager(cache), stream)
        assert (sequences.get(sequences.create_sequence()), sequences.dtype) == (([], []), None)
        assert sequences.memory_capacity == B * STATES


def test_in_an_active_slot_the_lengths_are_those_of_the_cache(memory, stream):
    cache, sequences = make("manager", memory, stream)
    a, b = sequences.create_sequence(), sequences.create_sequence()
    sequences.add(a, 4)
    sequences.pin(a)
    cache.reset_for_new_sequences([1, 1, 1, 0, 4])  # b, which is empty, is run too
    for seq in (a, b):
        sequences.add(seq, 2)
    sequences.truncate(a, 5)
    assert cache.host_kv_cache_lengths == (1, 1, 1, 2, 5)
    text = "sequence 1 is in active slot 3, and no other slot is free. Shrink the active batch, or enable swapping. Nothing was changed."
    sequences.refuses(CapacityError, text, sequences.unpin, b)
    cache.commit_sequence_length(1)
    cache.commit_sequence_length(on_device(memory, [1] * 5, stream), max_increment=1)
    with pytest.raises(LengthsUnknown):
        sequences.length(a)
    cache.set_active_batch_size(2)
    assert (sequences.length(a), sequences.length(b)) == (7, 4), "the device knows, though the slots are not active any more"


#: What is done to a sequence whose slot is active and holds five tokens, and how many it has afterwards; None if they are lost.
LEAVE, ENTER, RUN, CLEAR = ("set_active_batch_size", 0), ("set_active_batch_size", B), ("commit_sequence_length", 1), ("clear_slot", 4)
RESET, COMPACT = "reset_for_new_sequences", "compact_batch"
FATES = [
    ([LEAVE], 5, 5),
    ([RUN, LEAVE], 6, 6),
    ([LEAVE, ENTER], None, None),
    ([LEAVE, (RESET, [0] * B)], None, None),
    ([LEAVE, (RESET, [0, 0, 0, 0, 4]), RUN], None, 5),
    ([LEAVE, (RESET, [0, 0, 0, 0, 6])], None, 6),
    ([(RESET, [0] * B)], 0, 0),
    ([(RESET, [1, 1]), ENTER], None, None),
    ([CLEAR, LEAVE, ENTER, RUN], 1, 1),
    ([CLEAR, LEAVE, (RESET, [0, 0, 0, 0, 2])], None, 2),
    ([(COMPACT, [0, 1, 2, 3, -1], 5, 4)], 5, 5),
    ([(COMPACT, [0, 1, 2, 3, -1], 5, 4), ENTER], None, None),
    ([(COMPACT, [-1, -1, -1, 0, -1], 5, 1), (RESET, [0, 0, 0, 0, 5])], None, 5),
    ([(COMPACT, [0, 4, 2, 3, 1], 5, 5), ("set_active_batch_size", 1)], 5, 5),
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("calls", "unpinned", "pinned"), FATES)
def test_what_becomes_of_a_sequence(memory, stream, known, calls, unpinned, pinned):
    """Its tokens are never other ones, nor lost without an error, nor counted wrongly before anybody asks how many there are."""
    for pin, expected in ((False, unpinned), (True, pinned)):
        cache, sequences = make("manager", memory, stream)
        seq = sequences.create_sequence()
        if pin:
            sequences.pin(seq)
        cache.set_active_batch_size(B)
        cache.commit_sequence_length([0, 0, 0, 0, 4])
        last = [0, 0, 0, 0, 1]
        cache.commit_sequence_length(last if known else on_device(memory, last, stream), **LIMIT[known])
        for name, *arguments in calls:
            getattr(cache, name)(*arguments)
        if expected is None:
            sequences.refuses(SequenceError, f"sequence {seq}: {TAKEN}", sequences.length, seq)
            continue
        others = [bound for slot, bound in enumerate(cache.lengths.upper_bounds) if slot != sequences.slots[seq]]
        assert sequences.memory_used == (sum(others) + expected) * TOKEN["manager"]
        assert sequences.length(seq) == expected
        cache.close()


def test_a_slot_of_known_length_beside_one_that_only_the_device_knows(memory, stream):
    cache, sequences = make("manager", memory, stream)
    a, b = sequences.new(2, 3)
    cache.set_active_batch_size(2)
    for slot in (a, b):
        sequences.pin(slot, slot=slot)
    cache.commit_sequence_length(on_device(memory, [1, 0], stream), max_increment=2)
    refused = "were changed by values that only the device has. Call sync_lengths(stream=) to read them."
    cache.clear_slot(1)
    assert sequences.length(b) == 0
    sequences.unpin(b)
    for call in (sequences.length, sequences.unpin, sequences.get):
        sequences.refuses(LengthsUnknown, f"the lengths of slots [0] {refused}", call, a)
    cache.set_active_batch_size(0)
    assert (sequences.memory_used, sequences.length(a), sequences.memory_used) == (4 * TOKEN["manager"], 3, 3 * TOKEN["manager"])


@pytest.mark.parametrize("swapping", [False, True])
def test_into_a_certain_slot(memory, stream, swapping):
    cache, sequences = make("manager", memory, stream, swapping=swapping)
    cache.reset_for_new_sequences([0, 2])
    a, b, c = sequences.new(1, 2, 3)  # in slots 4, 3, 2

    def refused(seq, slot, text):
        sequences.refuses(CapacityError, f"{text} Nothing was changed.", sequences.pin, seq, slot=slot)

    assert (sequences.pin(a, slot=2), sequences.slots) == (2, [2, 3, 4])  # c goes where a was
    refused(b, 2, f"slot 2 holds sequence {a}, which is active or pinned.")
    refused(b, 1, "slot 1 is active and not empty. Clear it before.")
    assert (sequences.pin(a, slot=0), sequences.slots) == (0, [0, 3, 4])
    assert cache.host_kv_cache_lengths == (1, 2)
    refused(b, 0, f"slot 0 holds sequence {a}, which is active or pinned.")
    d = sequences.create_sequence()
    if swapping:  # from an active slot, which is not free for c
        assert (sequences.pin(a, slot=4), sequences.slots) == (4, [4, 3, None, 2])
        assert sequences.memory_swapped == 3 * TOKEN["manager"]
    else:
        refused(a, 4, f"sequence {c} must leave slot 4, and no other is free.")
        sequences.destroy_sequence(d)
        assert (sequences.pin(a, slot=4), sequences.slots) == (4, [4, 3, 2])
    assert cache.host_kv_cache_lengths == (1, 2), "the slot that it left is its runner's"
    for seq in (a, b, c):
        sequences.check(seq, seq + 1)


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
        (3, values, ShapeError, f"keys: {one} int."),
        (keys, [values[0], values[1], [1]], ShapeError, "values[2]: expected an array [H, n, D], got list."),
        ([np.float32(keys[0]), *keys[1:]], values, DTypeError, "keys[0]: expected float16, which the cache stores, got float32."),
        (keys, four[1], ShapeError, f"values[0]: {wrong} (2, 2, 16), got (2, 4, 16)."),
        (keys[::-1], values, ShapeError, f"keys[0]: {wrong} (2, 2, 16), got (3, 2, 16)."),
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
        (sequences.truncate, (seq, 5), RangeError, "truncate: sequence 0 holds 4 tokens; expected 0 to 4, got 5."),
        (sequences.truncate, (seq, 1.5), RangeError, "new_length: expected an integer, got 1.5."),
        (sequences.reserve, (-1,), RangeError, "num_sequences: expected at least 0, got -1."),
        (partial(sequences.pin, slot=5), (seq,), SlotError, f"slot 5: {slots}"),
        *((call, (gone, *rest), SequenceError, f"sequence {gone}: it was destroyed.") for call, rest in of_ids),
        *((call, (6, *rest), SequenceError, f"sequence 6: {unknown}") for call, rest in of_ids),
        (sequences.get, ("a",), SequenceError, "sequence: expected an integer, got 'a'."),
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
    with pytest.raises(ConfigError, match="expected a cache without one, got one that is under another"):
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
    for name, values in ("append", tokens(cache, 1, 0)), ("get", ()), ("truncate", (0,)), ("pin", ()), ("unpin", ()):
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


def three_swaps(memory, stream):
    """Three sequences of four tokens past the threshold, of which the calls that are returned send one or two out."""
    cache, sequences = make("manager", memory, stream, swapping=True, threshold=12 / 35)
    cache.reset_for_new_sequences([0])
    sequences.new(4, 4, 4)
    assert sequences.memory_swapped == 0
    into, out = partial(sequences.pin, 2, slot=0), partial(sequences.unpin, 2)
    return cache, sequences, [partial(sequences.add, 0, 3), partial(sequences.pin, 2, slot=3), lambda: (into(), out())]


def test_no_room_on_the_host():
    memory = FailingMemory()
    for which, n in ((0, 0), (1, 0), (1, 1), (2, 0)):
        cache, sequences, calls = three_swaps(memory, memory.create_stream())
        memory.left, memory.failures = n, 1
        sequences.refuses(CapacityError, "no room.", calls[which])
        calls[which]()
        for seq in (1, 2):
            sequences.check(seq, 4)
        cache.close()


@needs_standin
def test_page_locked_memory_is_all_that_swapping_allocates(memory, stream):
    _, sequences, calls = three_swaps(memory, stream)
    standin = StandIn()
    standin.take_calls()
    calls[0]()
    assert [call for call in standin.take_calls() if call in ALLOCATIONS] == ["cuMemAllocHost_v2"]
    assert standin.page_locked_nbytes == sequences.memory_swapped == 4 * TOKEN["manager"]
    sequences.check(1, 4)
    sequences.destroy_all_sequences()
    assert (standin.page_locked_nbytes, standin.device_nbytes) == (0, 0)
