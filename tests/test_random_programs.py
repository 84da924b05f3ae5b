"""Random programs beside an oracle without any layout: a slot is a list of tokens, a token a list of its bytes in each layer."""

import os
from random import Random

import numpy as np
import pytest
from cache_cases import S, make_cache, next_states_of, on_device, rows_of, states_of, whole

from trt_kvcache import HostMemory, KVLayout, SequenceCacheManager
from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.errors import CapacityError, ConfigError, LengthsUnknown, SequenceError
from trt_kvcache.snapshot import load_snapshot, save_snapshot
from trt_kvcache.snapshot_records import ModelIdentity

PROGRAMS = {"host": 300, "emulated": 60, "gpu": 300}[os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host")]
SLOW_PROGRAMS = 10_000

MODEL = ModelIdentity(fingerprint="random")
DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]
PING_PONG = "hybrid", {"ping_pong": True}
KINDS = [("manager", {}), ("linear", {"num_mamba_layers": 0}), ("linear", {}), ("hybrid", {}), PING_PONG, PING_PONG]


class Beside:
    """A cache and what it should hold. An operation draws its arguments, and is done to both."""

    def __init__(self, cache, saved, path):
        self.cache, self.saved, self.path = cache, saved, path
        self.memory, self.stream, self.slots = cache.memory, cache.memory.create_stream(), cache.max_batch_size
        self.longest = cache.lengths.max_sequence_length
        self.lengths = []
        #: Whether the host may not know them.
        self.blurred = False
        #: Of each slot the first tokens, as far as known: more than its length where longer ones were there before.
        self.tokens = [[] for _ in range(self.slots)]
        #: Of current and next states those of each slot, or None where a sequence may have waited.
        first = [self.zeros() for _ in range(self.slots)]
        second = first if states_of(cache) == next_states_of(cache) else list(first)
        self.states = [first, second]
        self.recurrent = bool(states_of(cache))
        self.sequences = None
        #: What sequences hold that are not in active slots.
        self.held = {}
        self.pinned = set()
        #: Slots of sequences, where they are active or pinned.
        self.places = {}
        self.lost = []
        for view in rows_of(cache):
            self.upload(whole(view), np.full(view.allocation.nbytes, 0xFF, np.uint8))  # NaN in every float format
        self.addresses = self.find_addresses()

    # --- bytes ---

    @staticmethod
    def bytes_of(view):
        array = view if isinstance(view, np.ndarray) else view.numpy()
        return array.view(np.uint8)

    def upload(self, view, array):
        self.memory.upload(view, array, stream=self.stream)
        self.memory.synchronize(self.stream)

    def find_addresses(self):
        views = [self.cache.lengths.tensor, *rows_of(self.cache)]
        return [view.ptr for view in views] + sorted(view.ptr for view in [*states_of(self.cache), *next_states_of(self.cache)])

    def new_tokens(self, random, count):
        layers = [(layer.num_kv_heads, layer.head_dim * itemsize(self.cache.kv_config.dtype)) for layer in self.cache.kv_config.layers]
        return [[random.integers(0, 256, (2, *layer), np.uint8) for layer in layers] for _ in range(count)]

    def step(self, random, slot, count):
        """What an enqueue does to one slot: rows of new tokens after those that it holds, and its next states."""
        length, new = self.lengths[slot], self.new_tokens(random, count)
        kv = getattr(self.cache, "kv_cache_manager", self.cache)
        for layer, which in np.ndindex(kv.num_layers if count else 0, 2):
            rows = kv.get_separate_kv_cache(layer)[which][slot : slot + 1]
            array = rows.numpy()
            array.view(np.uint8)[0, :, length : length + count] = np.stack([token[layer][which] for token in new], axis=1)
            self.upload(rows, array)
        self.tokens[slot][length:] = new + self.tokens[slot][length + count :]
        states = []
        for view in next_states_of(self.cache):
            state = view[slot : slot + 1].numpy()
            states.append(random.integers(0, 256, state.view(np.uint8).shape, np.uint8)[0])
            state.view(np.uint8)[0] = states[-1]
            self.upload(view[slot : slot + 1], state)
        self.states[1][slot] = states

    def zero(self, *slots):
        for slot in slots:
            self.lengths[slot], self.states[0][slot] = 0, self.zeros()

    def zeros(self):
        return [np.zeros_like(self.bytes_of(view)[0]) for view in states_of(self.cache)]

    # --- lengths ---

    def reset(self, random):
        count = random.integers(0, self.slots + 1)
        for slot in range(len(self.lengths), count):
            seq = self.waiting_in(slot)
            if seq is not None and self.held[seq][0]:
                self.tokens[slot], self.states[0][slot] = self.held[seq]
        lengths = [0 if self.states[0][slot] is None else int(random.integers(0, len(self.tokens[slot]) + 1)) for slot in range(count)]
        self.resize(lengths)
        self.blurred = False
        self.cache.reset_for_new_sequences(lengths, stream=self.stream)
        self.lengths = lengths
        self.zero(*(slot for slot, length in enumerate(self.lengths) if not length))

    def activate(self, random):
        old, new = len(self.lengths), int(random.integers(0, self.slots + 1))
        self.resize(self.lengths[:new] + [0] * (new - old))
        self.cache.set_active_batch_size(new, stream=self.stream)
        self.lengths = self.lengths[:new] + [0] * (new - old)
        self.zero(*range(old, new))

    def commit(self, random):
        """An enqueue over all active slots, or over a run of them; then a commit of a number, of values or of a device tensor."""
        active, how, whole_batch = len(self.lengths), random.integers(0, 3), random.random() < 0.6
        first, last = (0, active) if whole_batch else sorted(random.integers(0, active + 1, 2).tolist())
        new = [int(random.integers(0, 3)) if first <= slot < last else 0 for slot in range(active)]
        if how == 0 and whole_batch:
            new = [int(random.integers(0, 3))] * active
            given, limit = (new[0] if new else 1), None
        elif how == 1:
            given, limit = on_device(self.memory, new, self.stream), max(new, default=0) + random.integers(0, 2)
        else:
            given, limit = (new if random.random() < 0.5 else np.array(new, np.int32)), None
        most = [count if limit is None else limit for count in new]
        arguments = {"stream": self.stream} if limit is None else {"stream": self.stream, "max_increment": int(limit)}
        if any(bound + count > self.longest for bound, count in zip(self.cache.lengths.upper_bounds, most, strict=True)):
            with pytest.raises(CapacityError):
                self.cache.commit_sequence_length(given, **arguments)
            return
        for slot in range(first, last):
            self.step(random, slot, new[slot])
        if self.recurrent and whole_batch:
            self.cache.swap()
            self.states.reverse()
        elif self.recurrent and first < last:
            self.cache.copy_back(first, last - first, stream=self.stream)
            self.states[0][first:last] = self.states[1][first:last]
        self.cache.commit_sequence_length(given, **arguments)
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.blurred |= limit is not None

    def clear(self, random):
        if self.lengths:
            slot = int(random.integers(0, len(self.lengths)))
            self.cache.clear_slot(slot, stream=self.stream)
            self.zero(slot)

    def rewind(self, random):
        if self.lengths and not self.blurred:
            slot = int(random.integers(0, len(self.lengths)))
            length = int(random.integers(0, self.lengths[slot] + 1))
            if self.recurrent:
                with pytest.raises(ConfigError, match="recurrent states cannot go back"):
                    self.cache.rewind(slot, length, stream=self.stream)
            else:
                self.cache.rewind(slot, length, stream=self.stream)
                self.lengths[slot] = length

    def sync(self, random):
        self.cache.sync_lengths(stream=self.stream)
        self.blurred = False

    # --- slots ---

    def compact(self, random):
        old = len(self.lengths)
        kept = [slot for slot in range(old) if random.random() < 0.7]
        device = random.random() < 0.3
        order = kept if device else random.permutation(kept).astype(int).tolist()
        mapping = [order.index(slot) if slot in kept else -1 for slot in range(old)]
        given = on_device(self.memory, mapping, self.stream) if device else mapping
        for seq, slot in [*self.places.items()]:
            if slot < old and (len(kept) < old if device else mapping[slot] < 0 and slot < len(kept)):
                self.lose(seq)
            elif slot < old and mapping[slot] >= 0:
                self.places[seq] = mapping[slot]
        self.resize([0] * len(kept))
        self.cache.compact_batch(given, old, len(kept), stream=self.stream)
        moved = [(self.tokens[slot][: self.lengths[slot]], self.states[0][slot]) for slot in order]
        self.lengths, self.blurred = [self.lengths[slot] for slot in order], self.blurred or device
        for slot, (tokens, states) in enumerate(moved):
            self.tokens[slot], self.states[0][slot] = tokens, states

    def capture(self, random):
        slot = int(random.integers(0, self.slots))
        if self.states[0][slot] is not None:
            length = int(random.integers(0, len(self.tokens[slot]) + 1))
            parts = {"kv_cache": self.cache.capture_kv_cache(slot, length, stream=self.stream)}
            if self.recurrent:
                parts["recurrent_states"] = self.cache.capture_recurrent_states(slot, stream=self.stream)
                parts["conv_states"] = self.cache.capture_conv_states(slot, stream=self.stream)
            self.saved[3:] = []
            self.saved.insert(0, (parts, self.tokens[slot][:length], self.states[0][slot]))

    def restore(self, random):
        """What this cache or the one of the other layout captured."""
        fitting = [one for one in self.saved if len(one[1]) <= self.longest]
        if fitting:
            parts, tokens, states = fitting[random.integers(0, len(fitting))]
            slot = self.target(random)
            for part, tensors in parts.items():
                getattr(self.cache, f"restore_{part}")(tensors, slot, stream=self.stream)
            self.put(slot, tokens, states)

    def target(self, random):
        slot = int(random.integers(0, self.slots))
        if slot >= len(self.lengths):
            self.forget_sequences()
        return slot

    def put(self, slot, tokens, states):
        self.tokens[slot][: len(tokens)] = tokens
        self.states[0][slot] = states

    def snapshot(self, random, other):
        """Save an active slot to a file, and restore it in a slot of this cache or of the other."""
        if not self.lengths or self.blurred:
            return
        slot, into = int(random.integers(0, len(self.lengths))), self if random.random() < 0.5 else other
        tokens = self.tokens[slot][: self.lengths[slot]]
        if len(tokens) <= into.longest:
            save_snapshot(self.path, self.cache, slot, tokens=range(len(tokens)), model=MODEL, stream=self.stream)
            to = into.target(random)
            loaded = load_snapshot(self.path, into.cache, to, model=MODEL, stream=into.stream)
            assert loaded.reused_tokens == len(tokens)
            if tokens:
                into.put(to, tokens, self.states[0][slot])
            into.compare()

    # --- sequences, which wait in inactive slots or on the host ---

    def forget_sequences(self):
        """Look at all of them, and be done: what comes next may take their slots."""
        self.sync(None)
        for seq in self.held:
            self.check_sequence(seq)
        if self.sequences is not None:
            self.sequences.close()
            self.pinned.clear()
            self.forget_inactive()
        self.sequences, self.held, self.places = None, {}, {}

    def inside(self, seq):
        return self.places.get(seq, self.slots) < len(self.lengths)

    def content(self, seq):
        if not self.inside(seq):
            return self.held[seq]
        slot = self.places[seq]
        return self.tokens[slot][: self.lengths[slot]], self.states[0][slot]

    def waiting_in(self, slot):
        entry = self.sequences._table.at(slot) if self.sequences else None
        return None if entry is None else entry.id

    def lose(self, seq):
        self.lost.append(seq)
        del self.held[seq]
        self.places.pop(seq, None)
        self.pinned.discard(seq)

    def resize(self, lengths):
        """Before slots leave or enter the active batch: those that enter get so many tokens."""
        old, new = len(self.lengths), len(lengths)
        for seq, slot in [*self.places.items()]:
            if new <= slot < old:
                self.held[seq] = self.content(seq)
                if self.cache.lengths.upper_bounds[slot] and not self.lengths[slot]:
                    self.lose(seq)  # it may have tokens, for all that the host knows
                    self.sequences.destroy_sequence(self.lost.pop())
                elif seq not in self.pinned:
                    del self.places[seq]
        for slot in range(old, new):
            seq = self.waiting_in(slot)
            if seq is not None and (seq not in self.pinned if lengths[slot] else self.held[seq][0]):
                self.lose(seq)
            elif seq is not None:
                self.places[seq] = slot

    def sequence(self, random):
        """A few operations on sequences."""
        self.sync(random)
        self.sequences = self.sequences or SequenceCacheManager(self.cache, enable_swapping=True, swap_threshold=0.7)
        for operation in random.choice(["create", "append", "get", "truncate", "pin", "unpin", "destroy", "use", "use"], 6):
            seq = int(random.choice([*self.held])) if self.held else -1
            if operation == "create" or not self.held:
                if self.has_room(-1, self.sequences.create_sequence):
                    self.held[self.sequences.create_sequence()] = [], None
            elif operation == "destroy":
                self.lose(seq)
                self.sequences.destroy_sequence(self.lost.pop())
            else:
                getattr(self, f"{operation}_sequence")(random, seq)
            assert [self.sequences.length(seq) for seq in self.held] == [len(self.content(seq)[0]) for seq in self.held]
            self.forget_inactive()

    def forget_inactive(self):
        if self.sequences is None:
            return
        pinned = {self.places[seq]: self.held[seq] for seq in self.pinned if not self.inside(seq)}
        for slot in range(len(self.lengths), self.slots):
            tokens, states = pinned.get(slot, ([], None))
            self.tokens[slot], self.states[1][slot] = list(tokens), states if tokens else None
            if tokens or slot not in pinned:
                self.states[0][slot] = self.states[1][slot]

    def fits(self, seq):
        others = sum(not self.inside(other) for other in self.pinned - {seq})
        return self.inside(seq) or self.slots - len(self.lengths) > others

    def has_room(self, seq, call):
        """Whether a sequence can have a slot: one is inactive, and no other is pinned there. If not, a call must say so."""
        if self.fits(seq) or any(entry.id == seq and entry.slot is not None for entry in self.sequences._table):
            return True  # the latter: it is there already
        with pytest.raises(CapacityError):
            call()
        return False

    def get_sequence(self, _, seq):
        if self.has_room(seq, lambda: self.sequences.get(seq, stream=self.stream)):
            self.check_sequence(seq)

    def check_sequence(self, seq):
        if not self.fits(seq):
            return
        tokens, _ = self.content(seq)
        for which, arrays in enumerate(self.sequences.get(seq, stream=self.stream)):
            for layer, array in enumerate(arrays):
                assert array.shape[1] == len(tokens)
                if tokens:
                    assert np.array_equal(self.bytes_of(array), np.stack([token[layer][which] for token in tokens], axis=1))

    def append_sequence(self, random, seq):
        tokens, _ = self.content(seq)
        new, count = self.new_tokens(random, 4), int(random.choice([0, 1, 2, 4]))
        dtype = numpy_dtype(self.cache.kv_config.dtype)
        layers = [np.stack(layer, axis=2).view(dtype)[:, :, :count] for layer in zip(*new, strict=True)]
        pair = [layer[0] for layer in layers], [layer[1] for layer in layers]
        call = lambda: self.sequences.append(seq, *pair, stream=self.stream)  # noqa: E731
        del new[count:]
        if self.recurrent or len(tokens) + len(new) > self.longest:
            with pytest.raises(ConfigError if self.recurrent else CapacityError):
                call()
        elif self.has_room(seq, call):
            call()
            if self.inside(seq):
                slot, length = self.places[seq], len(tokens)
                self.tokens[slot][length : length + len(new)] = new
                self.lengths[slot] += len(new)
            else:
                tokens += new

    def truncate_sequence(self, random, seq):
        tokens, _ = self.content(seq)
        length = int(random.integers(0, len(tokens) + 1))
        call = lambda: self.sequences.truncate(seq, length, stream=self.stream)  # noqa: E731
        if self.recurrent:
            with pytest.raises(ConfigError):
                call()
        elif self.has_room(seq, call):
            call()
            if self.inside(seq):
                self.lengths[self.places[seq]] = length
            else:
                tokens[length:] = []

    def pin_sequence(self, _, seq):
        if self.has_room(seq, lambda: self.sequences.pin(seq, stream=self.stream)):
            place = self.sequences.pin(seq, stream=self.stream)
            assert place == self.places.get(seq, place)
            assert self.inside(seq) or place >= len(self.lengths)
            self.pinned.add(seq)
            self.places[seq] = place
            if not self.content(seq)[0]:
                self.states[0][place] = self.zeros()

    def unpin_sequence(self, _, seq):
        self.held[seq] = self.content(seq)
        self.sequences.unpin(seq, stream=self.stream)
        self.pinned.discard(seq)
        self.places.pop(seq, None)

    def use_sequence(self, random, seq):
        """Bring it into an active slot, let an engine add a token, and put it away, or leave it there."""
        free = sorted({*range(len(self.lengths))} - {*self.places.values()})
        if self.inside(seq) or not free:
            return
        slot, (tokens, states) = int(random.choice(free)), self.held[seq]
        self.cache.clear_slot(slot, stream=self.stream)
        self.zero(slot)
        assert self.sequences.pin(seq, slot=slot, stream=self.stream) == slot
        self.lengths[slot], self.tokens[slot], self.places[seq] = len(tokens), list(tokens), slot
        self.pinned.add(seq)
        if tokens and self.recurrent:
            self.states[0][slot] = states
        self.forget_inactive()
        self.compare()
        if len(tokens) < self.longest:
            self.step(random, slot, 1)
            if self.recurrent:
                self.cache.copy_back(slot, 1, stream=self.stream)
                self.states[0][slot] = self.states[1][slot]
            self.cache.commit_sequence_length([int(other == slot) for other in range(len(self.lengths))], stream=self.stream)
            self.lengths[slot] += 1
        if random.random() < 0.5:
            self.unpin_sequence(random, seq)

    # --- all there is to see ---

    def compare(self):
        cache = self.cache
        self.memory.synchronize(self.stream)
        self.forget_inactive()
        while self.lost:
            with pytest.raises(SequenceError, match="its slot was taken"):
                self.sequences.length(self.lost[-1])
            self.sequences.destroy_sequence(self.lost.pop())
        assert cache.active_batch_size == len(self.lengths)
        assert cache.kv_cache_lengths.numpy().tolist() == self.lengths
        assert all(bound >= length for bound, length in zip(cache.lengths.upper_bounds, self.lengths, strict=True))
        try:
            assert cache.host_kv_cache_lengths == cache.lengths.upper_bounds == tuple(self.lengths)
            assert cache.kv_cache_all_empty is (not any(self.lengths))
        except LengthsUnknown:
            assert self.blurred
        for layer, view in enumerate(rows_of(cache)):
            rows = self.bytes_of(view)
            for slot, tokens in enumerate(self.tokens):
                if tokens:
                    assert np.array_equal(rows[slot, :, :, : len(tokens)], np.stack([token[layer] for token in tokens], axis=2))
        for states, views in zip(self.states, (states_of(cache), next_states_of(cache)), strict=True):
            for index, view in enumerate(views):
                for slot, array in enumerate(self.bytes_of(view)):
                    assert states[slot] is None or np.array_equal(array, states[slot][index])
        assert self.find_addresses() == self.addresses


def run(memory, path, kind, layout, dtype, slots, operations):
    other = next(each for each in KVLayout if each is not layout)
    saved, (kind, options) = [], kind
    with (
        make_cache(kind, memory, **options, layout=layout, dtype=dtype, max_batch_size=slots, max_sequence_length=S) as one,
        make_cache(kind, memory, **options, layout=other, dtype=dtype, max_batch_size=6 - slots, max_sequence_length=S + 2) as two,
    ):
        caches = [Beside(cache, saved, path) for cache in (one, two)]
        for operation, seed in [("activate", 9), *operations]:
            random = np.random.default_rng(seed)
            which = seed % 4 == 3
            if operation == "snapshot":
                caches[which].snapshot(random, caches[not which])
            else:
                getattr(caches[which], operation)(random)
            caches[which].compare()
        for cache in caches:
            cache.forget_sequences()
            cache.compare()
        saved.clear()


COMMON, RARE = ["commit", "sequence"], ["reset", "activate", "clear", "rewind", "sync", "compact", "capture", "restore", "snapshot"]


def program(seed):
    random = Random(seed)
    operations = [(random.choice([*COMMON * 3, *RARE]), random.getrandbits(16)) for _ in range(random.randint(10, 24))]
    return random.choice(KINDS), random.choice(list(KVLayout)), random.choice(DTYPES), random.randint(1, 5), operations


def check(memory, path, seeds):
    for seed in seeds:
        of = program(seed)
        print(f"program {seed}: {of}")
        run(memory, path, *of)


@pytest.mark.parametrize("part", range(4))
def test_programs(memory, tmp_path, part):
    check(memory, tmp_path / "slot", range(part, PROGRAMS, 4))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_programs(tmp_path, part):
    check(HostMemory(), tmp_path / "slot", range(PROGRAMS + part, PROGRAMS + SLOW_PROGRAMS, 20))
