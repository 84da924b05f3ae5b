"""``SequenceCacheManager``: which rows and states a handle has, wherever they are, and what is refused. See test_random_programs."""

import copy
import inspect
import pickle
from functools import lru_cache, partial

import numpy as np
import pytest

from tests.helpers.cache_cases import B, CapturingMemory, FailingMemory, Image, S, Unchanged, fill_all, make_cache, on_device
from tests.simt.standin import ALLOCATIONS, StandIn, needs_standin
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


@lru_cache
def takes_stream(function):
    return "stream" in inspect.signature(function).parameters


class On:
    """A manager whose calls are on one stream, if they do not say which."""

    def __init__(self, manager, stream):
        self._manager, self._stream = manager, stream

    @property
    def __class__(self):
        return type(self._manager)

    def __getattr__(self, name):
        value = getattr(self._manager, name)
        return partial(value, stream=self._stream) if inspect.ismethod(value) and takes_stream(value.__func__) else value

    def __enter__(self):
        self._manager.__enter__()
        return self

    def __exit__(self, *_):
        self.close()


class Sequences(On):
    """Whose tokens are random, by the id of a sequence."""

    def create(self):
        return self.create_sequence()

    def add(self, seq, count):
        self.append(seq, *tokens(self.cache, count, seq))

    def new(self, *counts):
        ids = [self.create() for _ in counts]
        for seq, count in zip(ids, counts, strict=True):
            self.add(seq, count)
        return ids

    def check(self, seq, count):
        assert raw(self.get(seq)) == raw(tokens(self.cache, count, seq))

    @property
    def slots(self):
        return [entry.slot for entry in sorted(self._table, key=lambda entry: entry.id)]

    def refuses(self, error, text, call, *args, **kw):
        before = handles(self)
        with Unchanged(self.cache), pytest.raises(error) as caught:
            call(*args, **kw)
        assert str(caught.value) == text
        assert handles(self) == before


def make_both(memory, stream, kind="manager", *, states=True, swapping=False, threshold=1, **changes):
    changes |= {} if states or kind != "linear" else {"num_mamba_layers": 0}
    cache = make_cache(kind, memory, **changes)
    return On(cache, stream), Sequences(SequenceCacheManager(cache, enable_swapping=swapping, swap_threshold=threshold), stream)


@pytest.fixture
def make(memory, stream):
    return partial(make_both, memory, stream)


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
    return [(layer.shape, layer.tobytes()) for arrays in pair for layer in arrays]


def handles(seqs):
    table = seqs._table
    entries = [(e.id, e.slot, e.length, e.pinned, e.saved and [a.tobytes() for a in e.saved.arrays]) for e in table]
    return entries, set(table._lost_ids), seqs.memory_used, seqs.memory_swapped


def test_what_append_takes(make, memory, stream):
    """One array or one per layer, of any strides, on the host or on a device. It may be changed as soon as the call returns."""
    cache, seqs = make("linear", states=False)
    keys, values = tokens(cache, 3, 1)
    wide = np.stack([keys, values], axis=-1)
    staged = [memory.staging(keys.shape, "float16") for _ in range(2)]  # which a copy may read at any time until it is done
    staged[0][...], staged[1][...] = keys, values
    on_device = memory.to_device(keys, stream=stream), [memory.to_device(layer, stream=stream) for layer in values]
    for form in ((keys, list(values)), (wide[..., 0], wide[..., 1]), on_device, staged):
        seq = seqs.create()
        seqs.append(seq, *form)
        if form is staged:
            staged[0][...] = staged[1][...] = 0
        got = seqs.get(seq)
        assert raw(got) == raw((keys, values))
        got[0][...] = 0  # a copy
        assert raw(seqs.get(seq)) == raw((keys, values))
    assert (seqs.length(seq), seqs.num_sequences, seqs.dtype, got[1].dtype) == (3, 4, "float16", np.float16)


@pytest.mark.parametrize("kind", ["manager", "linear", "hybrid"])
def test_bytes(make, kind):
    cache, seqs = make(kind, states=False, swapping=True, threshold=0.5)
    token, states = TOKEN[kind], STATES if kind == "hybrid" else 0
    assert (seqs.memory_capacity, seqs.memory_used, seqs.memory_swapped) == (B * (S * token + states), 0, 0)
    assert (seqs.max_sequences, make(kind)[1].max_sequences) == (None, B)
    if kind == "hybrid":
        cache.reset_for_new_sequences([0, 3])
        assert seqs.memory_used == 3 * token + states
    else:
        (seq,) = seqs.new(4)
        cache.reset_for_new_sequences([0, 3])
        assert seqs.memory_used == 7 * token
        for more, used, swapped in ((7, 14, 0), (4, 14, 4)):  # 18 of 35 are past a half
            seqs.new(more)
            assert (seqs.memory_used, seqs.memory_swapped) == (used * token, swapped * token)
        seqs.check(seq, 4)  # and 18 are again: the one with 7 goes
        assert (seqs.memory_used, seqs.memory_swapped) == (11 * token, 7 * token)
    seqs.destroy_all_sequences()
    assert (seqs.num_sequences, seqs.memory_swapped) == (0, 0)


def test_the_one_used_longest_ago_goes(make, memory):
    cache, seqs = make(swapping=True)
    cache.reset_for_new_sequences([2])
    a, b, c, d = seqs.new(1, 1, 1, 1)
    assert seqs.slots == [4, 3, 2, 1]
    seqs.get(a)
    assert seqs.pin(b) == 3
    e = seqs.create()
    assert seqs.slots[e] is None
    seqs.get(e)
    assert seqs.slots == [4, 3, None, 1, 2]
    seqs.truncate(c, 1, stream=memory.create_stream())  # d makes way, and c is in another slot
    assert seqs.slots == [4, 3, 1, None, 2]
    for seq in (a, c, e):
        seqs.pin(seq)
    seqs.reserve(0)
    full = "expected 1 free slots, got 0 of 5. All are active or pinned."
    seqs.refuses(CapacityError, f"reserve: {full}", seqs.reserve, 1)
    seqs.refuses(CapacityError, f"create_sequence: {full}", seqs.create_sequence)
    text = f"sequence {d} has no slot, and all slots are active or pinned. Nothing was changed."
    seqs.refuses(CapacityError, text, seqs.get, d)
    for seq in (c, a):
        seqs.unpin(seq)
    assert seqs.pin(d) == 1
    seqs.check(c, 1)
    assert seqs.slots[a] is None
    seqs.check(d, 1)
    seqs.destroy_sequence(c)
    seqs.reserve(9)  # one slot is free, and enough
    cache.reset_for_new_sequences([1] * B)  # all of them are run now
    seqs.unpin(d)
    assert seqs._table.find(d).slot is None, "no slot is left for it but the host"


def test_without_swapping_slots_are_all(make):
    cache, seqs = make(threshold=0.01)
    cache.set_active_batch_size(2)
    ids = seqs.new(S, S, S)
    full = "free slots, got {} of 5. Destroy sequences, or enable swapping."
    seqs.refuses(CapacityError, f"create_sequence: expected 1 {full.format(0)}", seqs.create_sequence)
    seqs.destroy_sequence(ids[1])
    seqs.reserve(1)
    seqs.refuses(CapacityError, f"reserve: expected 2 {full.format(1)}", seqs.reserve, 2)
    for want in (3, 4):  # an id is never used again
        assert seqs.create() == want
        assert (seqs.num_sequences, seqs.memory_swapped) == (3, 0)
        seqs.destroy_sequence(want)
    seqs.check(ids[2], S)


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_run_put_away_and_run_again_elsewhere(make, stream, kind, ping_pong):
    cache, seqs = make(kind, swapping=True, ping_pong=ping_pong)
    fill_all(cache, stream)
    want = Image(cache)
    seq = seqs.create()
    cache.set_active_batch_size(2)
    assert seqs.pin(seq, slot=1) == 1
    want.zero_states(0, 1)
    want.check(cache)
    fill_all(cache, stream, 1)  # what an engine does
    cache.commit_sequence_length([0, 5])
    held = Image(cache)
    assert (seqs.length(seq), seqs.memory_used) == (5, 5 * TOKEN[kind] + (1 + ping_pong) * STATES)
    want = Image(cache)
    seqs.unpin(seq)
    want.move(4, held, 1, 5)
    for into, states in zip(want.next_states, held.states, strict=True):  # others may be swapped while it waits
        into[4] = states[1]
    want.check(cache)
    assert (cache.host_kv_cache_lengths, seqs.length(seq)) == ((0, 5), 5)
    cache.clear_slot(1)
    cache.swap()
    for _ in range(3):
        seqs.pin(seqs.create())
    assert seqs.memory_swapped == 5 * TOKEN[kind] + STATES
    fill_all(cache, stream, 2)
    want = Image(cache)
    assert seqs.pin(seq, slot=0) == 0
    want.move(0, held, 1, 5)
    want.check(cache)
    assert (cache.host_kv_cache_lengths, seqs.memory_swapped) == ((5, 0), 0)
    text = "the cache has recurrent layers, and their states follow an engine only. Pin the sequence, and run it."
    seqs.refuses(ConfigError, f"append: {text}", seqs.append, seq, [], [])
    seqs.refuses(ConfigError, f"truncate: {text}", seqs.truncate, seq, 1)


def test_a_hybrid_of_one_kind_of_layers(memory, stream):
    with make_cache("attention", memory) as cache:
        seqs = Sequences(SequenceCacheManager(cache), stream)
        seqs.check(*seqs.new(2), 2)
    with make_cache("states", memory) as cache:
        seqs = Sequences(SequenceCacheManager(cache), stream)
        assert (seqs.get(seqs.create()), seqs.dtype) == (([], []), None)
        assert seqs.memory_capacity == B * STATES


def test_active_slots_have_cache_lengths(make, memory, stream):
    cache, seqs = make()
    a, b = seqs.create(), seqs.create()
    seqs.add(a, 4)
    seqs.pin(a)
    cache.reset_for_new_sequences([1, 1, 1, 0, 4])  # b, which is empty, is run too
    for seq in (a, b):
        seqs.add(seq, 2)
    seqs.truncate(a, 5)
    assert cache.host_kv_cache_lengths == (1, 1, 1, 2, 5)
    text = "sequence 1 is in active slot 3, and no other slot is free. Shrink the active batch, or enable swapping. Nothing was changed."
    seqs.refuses(CapacityError, text, seqs.unpin, b)
    cache.commit_sequence_length(1)
    cache.commit_sequence_length(on_device(memory, [1] * 5, stream), max_increment=1)
    with pytest.raises(LengthsUnknown):
        seqs.length(a)
    cache.set_active_batch_size(2)
    assert (seqs.length(a), seqs.length(b)) == (7, 4), "the device knows, though the slots are not active any more"


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
def test_what_becomes_of_a_sequence(make, memory, stream, known, calls, unpinned, pinned):
    """Its tokens are never other ones, nor lost without an error, nor counted wrongly before anybody asks how many there are."""
    for pin, want in ((False, unpinned), (True, pinned)):
        cache, seqs = make()
        seq = seqs.create()
        if pin:
            seqs.pin(seq)
        cache.set_active_batch_size(B)
        cache.commit_sequence_length([0, 0, 0, 0, 4])
        last = [0, 0, 0, 0, 1]
        cache.commit_sequence_length(last if known else on_device(memory, last, stream), **LIMIT[known])
        for name, *args in calls:
            getattr(cache, name)(*args)
        if want is None:
            seqs.refuses(SequenceError, f"sequence {seq}: {TAKEN}", seqs.length, seq)
            continue
        others = [bound for slot, bound in enumerate(cache.lengths.upper_bounds) if slot != seqs.slots[seq]]
        assert seqs.memory_used == (sum(others) + want) * TOKEN["manager"]
        assert seqs.length(seq) == want
        cache.close()


def test_a_known_length_beside_an_unknown_one(make, memory, stream):
    cache, seqs = make()
    a, b = seqs.new(2, 3)
    cache.set_active_batch_size(2)
    for slot in (a, b):
        seqs.pin(slot, slot=slot)
    cache.commit_sequence_length(on_device(memory, [1, 0], stream), max_increment=2)
    refused = "were changed by values that only the device has. Call sync_lengths(stream=) to read them."
    cache.clear_slot(1)
    assert seqs.length(b) == 0
    seqs.unpin(b)
    for call in (seqs.length, seqs.unpin, seqs.get):
        seqs.refuses(LengthsUnknown, f"the lengths of slots [0] {refused}", call, a)
    cache.set_active_batch_size(0)
    assert (seqs.memory_used, seqs.length(a), seqs.memory_used) == (4 * TOKEN["manager"], 3, 3 * TOKEN["manager"])


@pytest.mark.parametrize("swapping", [False, True])
def test_into_a_certain_slot(make, swapping):
    cache, seqs = make(swapping=swapping)
    cache.reset_for_new_sequences([0, 2])
    a, b, c = seqs.new(1, 2, 3)  # in slots 4, 3, 2

    def refused(seq, slot, text):
        seqs.refuses(CapacityError, f"{text} Nothing was changed.", seqs.pin, seq, slot=slot)

    assert (seqs.pin(a, slot=2), seqs.slots) == (2, [2, 3, 4])  # c goes where a was
    refused(b, 2, f"slot 2 holds sequence {a}, which is active or pinned.")
    refused(b, 1, "slot 1 is active and not empty. Clear it before.")
    assert (seqs.pin(a, slot=0), seqs.slots) == (0, [0, 3, 4])
    assert cache.host_kv_cache_lengths == (1, 2)
    refused(b, 0, f"slot 0 holds sequence {a}, which is active or pinned.")
    d = seqs.create()
    if swapping:  # from an active slot, which is not free for c
        assert (seqs.pin(a, slot=4), seqs.slots) == (4, [4, 3, None, 2])
        assert seqs.memory_swapped == 3 * TOKEN["manager"]
    else:
        refused(a, 4, f"sequence {c} must leave slot 4, and no other is free.")
        seqs.destroy_sequence(d)
        assert (seqs.pin(a, slot=4), seqs.slots) == (4, [4, 3, 2])
    assert cache.host_kv_cache_lengths == (1, 2), "the slot that it left is its runner's"
    for seq in (a, b, c):
        seqs.check(seq, seq + 1)


def test_what_is_refused_changes_nothing(make, stream):
    cache, seqs = make(swapping=True)
    fill_all(cache, stream)
    cache.reset_for_new_sequences([1])
    ids = seqs.new(4, 4, 4, 4, 4)
    seq, gone = ids[0], seqs.create()
    seqs.destroy_sequence(gone)
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
        seqs.refuses(error, text, seqs.append, seq, k, v)
    calls = [(seqs.append, (keys, values)), (seqs.get, ()), (seqs.truncate, (0,)), (seqs.pin, ()), (seqs.unpin, ())]
    of_ids = [*calls, (seqs.length, ()), (seqs.destroy_sequence, ())]
    for call, args, error, text in (
        (seqs.truncate, (seq, 5), RangeError, "truncate: sequence 0 holds 4 tokens; expected 0 to 4, got 5."),
        (seqs.truncate, (seq, 1.5), RangeError, "new_length: expected an integer, got 1.5."),
        (seqs.reserve, (-1,), RangeError, "num_sequences: expected at least 0, got -1."),
        (partial(seqs.pin, slot=5), (seq,), SlotError, f"slot 5: {slots}"),
        *((call, (gone, *rest), SequenceError, f"sequence {gone}: it was destroyed.") for call, rest in of_ids),
        *((call, (6, *rest), SequenceError, f"sequence 6: {unknown}") for call, rest in of_ids),
        (seqs.get, ("a",), SequenceError, "sequence: expected an integer, got 'a'."),
    ):
        seqs.refuses(error, text, call, *args)
    for call, rest in calls:
        with Unchanged(cache), pytest.raises(PlaceError, match=r"^stream: expected"):
            call(seq, *rest, stream=None)
    seqs.pin(seq, slot=4)
    seqs.get(ids[-1])
    assert seqs.memory_swapped > 0
    seqs.close()
    seqs.close()
    assert (seqs.num_sequences, seqs.memory_swapped) == (0, 0)
    last = [partial(call, seq, *rest) for call, rest in of_ids]
    for call in (*last, seqs.create_sequence, seqs.destroy_all_sequences, lambda: seqs.reserve(0), seqs.__enter__):
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
    seqs = SequenceCacheManager(cache)
    with pytest.raises(ConfigError, match="expected a cache without one, got one that is under another"):
        SequenceCacheManager(cache)
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="SequenceCacheManager owns device memory and cannot be copied"):
            copier(seqs)
    assert seqs.cache is cache


def test_nothing_of_it_is_captured_in_a_graph():
    memory = CapturingMemory()
    cache, seqs = make_both(memory, memory.create_stream())
    seq = seqs.create()
    memory.capturing = True
    for name, values in ("append", tokens(cache, 1, 0)), ("get", ()), ("truncate", (0,)), ("pin", ()), ("unpin", ()):
        with Unchanged(cache), pytest.raises(CaptureError, match=f"^{name} cannot be captured: it waits for the device"):
            getattr(seqs, name)(seq, *values)
    memory.capturing = False
    cache, seqs = make_both(memory, memory.create_stream(), "hybrid", ping_pong=True)
    seqs.create()
    cache.reset_for_new_sequences([0] * B)
    cache.commit_sequence_length(1)
    memory.capturing = True
    with Unchanged(cache), pytest.raises(CaptureError, match=r"^keep_states cannot be captured: what is replayed later keeps nothing"):
        cache.set_active_batch_size(B - 1)


def three_swaps(make):
    """Three sequences of four tokens past the threshold, of which the calls that are returned send one or two out."""
    cache, seqs = make(swapping=True, threshold=12 / 35)
    cache.reset_for_new_sequences([0])
    seqs.new(4, 4, 4)
    assert seqs.memory_swapped == 0
    into, out = partial(seqs.pin, 2, slot=0), partial(seqs.unpin, 2)
    return cache, seqs, [partial(seqs.add, 0, 3), partial(seqs.pin, 2, slot=3), lambda: (into(), out())]


def test_no_room_on_the_host():
    memory = FailingMemory()
    for which, n in ((0, 0), (1, 0), (1, 1), (2, 0)):
        cache, seqs, calls = three_swaps(partial(make_both, memory, memory.create_stream()))
        memory.left, memory.failures = n, 1
        seqs.refuses(CapacityError, "no room.", calls[which])
        calls[which]()
        for seq in (1, 2):
            seqs.check(seq, 4)
        cache.close()


@needs_standin
def test_swapping_allocates_page_locked_memory_only(make):
    _, seqs, calls = three_swaps(make)
    standin = StandIn()
    standin.take_calls()
    calls[0]()
    assert [call for call in standin.take_calls() if call in ALLOCATIONS] == ["cuMemAllocHost_v2"]
    assert standin.page_locked_nbytes == seqs.memory_swapped == 4 * TOKEN["manager"]
    seqs.check(1, 4)
    seqs.destroy_all_sequences()
    assert (standin.page_locked_nbytes, standin.device_nbytes) == (0, 0)
