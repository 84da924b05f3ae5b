"""Random programs beside an oracle without any layout: a slot is a list of tokens, a token a list of its bytes in each layer."""

import os
from random import Random

import numpy as np
import pytest

from tests.handles.sequences import On, slots_of
from tests.helpers.caches import S, make_cache, next_states_of, on_device, rows_of, states_of, whole
from trt_kvcache import HostMemory, KVLayout, SequenceCacheManager
from trt_kvcache.dtypes import itemsize, numpy_dtype
from trt_kvcache.errors import CapacityError, ConfigError, LengthsUnknown, SequenceError
from trt_kvcache.sequences.model_identity import ModelIdentity
from trt_kvcache.sequences.snapshot import load_snapshot, save_snapshot

PROGRAMS = {"host": 300, "emulated": 60, "gpu": 300}[os.environ.get("TRT_KVCACHE_TEST_DEVICE", "host")]

MODEL = ModelIdentity(fingerprint="random")
DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"]
PING_PONG = "hybrid", {"ping_pong": True}
STATES_ALONE = "states", {"ping_pong": True}
KINDS = [
    ("manager", {}),
    ("linear", {"num_mamba_layers": 0}),
    ("linear", {}),
    ("hybrid", {}),
    PING_PONG,
    PING_PONG,
    ("conv", {}),
    STATES_ALONE,
]


class Beside:
    """A cache and what it should hold. An operation draws its arguments, and is done to both."""

    def __init__(self, cache, saved, path):
        self.saved, self.path, self.memory, self.slots = saved, path, cache.memory, cache.max_batch_size
        self.stream = cache.memory.create_stream()
        self.cache = On(cache, self.stream)
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
        self.seqs = None
        #: What sequences hold that are not in active slots.
        self.held = {}
        self.pinned = set()
        #: Slots of sequences, where they are active or pinned.
        self.places = {}
        self.lost = []
        for view in rows_of(cache):
            self.upload(whole(view), np.full(view.allocation.nbytes, 0xFF, np.uint8))  # NaN in every float format
        self.addresses = self.find_addresses()

    def upto(self, most):
        return int(self.random.integers(0, most + 1))

    def chance(self, of):
        return self.random.random() < of

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

    def new_tokens(self, count):
        config = self.cache.kv_config
        layers = [(layer.num_kv_heads, layer.head_dim * itemsize(config.dtype)) for layer in (config.layers if config else ())]
        return [[self.random.integers(0, 256, (2, *layer), np.uint8) for layer in layers] for _ in range(count)]

    def step(self, slot, count):
        """What an enqueue does to one slot: rows of new tokens after those that it holds, and its next states."""
        length, new = self.lengths[slot], self.new_tokens(count)
        kv = getattr(self.cache, "kv_cache_manager", self.cache)
        for layer, which in np.ndindex(kv.num_layers if kv is not None and count else 0, 2):
            rows = kv.get_separate_kv_cache(layer)[which][slot : slot + 1]
            array = rows.numpy()
            array.view(np.uint8)[0, :, length : length + count] = np.stack([token[layer][which] for token in new], axis=1)
            self.upload(rows, array)
        self.tokens[slot][length:] = new + self.tokens[slot][length + count :]
        states = []
        for view in next_states_of(self.cache):
            state = view[slot : slot + 1].numpy()
            states.append(self.random.integers(0, 256, state.view(np.uint8).shape, np.uint8)[0])
            state.view(np.uint8)[0] = states[-1]
            self.upload(view[slot : slot + 1], state)
        self.states[1][slot] = states

    def zero(self, *slots):
        for slot in slots:
            self.lengths[slot], self.states[0][slot] = 0, self.zeros()

    def zeros(self):
        return [np.zeros_like(self.bytes_of(view)[0]) for view in states_of(self.cache)]

    def reset(self):
        count = self.upto(self.slots)
        for slot in range(len(self.lengths), count):
            seq = self.waiting_in(slot)
            if seq is not None and self.held[seq][0]:
                tokens, self.states[0][slot] = self.held[seq]
                self.tokens[slot] = list(tokens)
        lengths = [0 if self.states[0][slot] is None else self.upto(len(self.tokens[slot])) for slot in range(count)]
        if self.would_empty_a_pinned_sequence(lengths):
            with pytest.raises(CapacityError, match="is pinned there with tokens"):
                self.cache.reset_for_new_sequences(lengths)
            return
        self.resize(lengths)
        self.blurred = False
        self.cache.reset_for_new_sequences(lengths)
        self.lengths = lengths
        self.zero(*(slot for slot, length in enumerate(lengths) if not length))

    def activate(self):
        old, new = len(self.lengths), self.upto(self.slots)
        lengths = self.lengths[:new] + [0] * (new - old)
        if self.would_empty_a_pinned_sequence(lengths):
            with pytest.raises(CapacityError, match="is pinned there with tokens"):
                self.cache.set_active_batch_size(new)
            return
        self.resize(lengths)
        self.cache.set_active_batch_size(new)
        self.lengths = lengths
        self.zero(*range(old, new))

    def commit(self):
        """An enqueue over all active slots, or over a run of them; then a commit of a number, of values or of a device tensor."""
        active, how, full = len(self.lengths), self.upto(2), self.chance(0.6)
        first, last = (0, active) if full else sorted([self.upto(active), self.upto(active)])
        new = [self.upto(2) if first <= slot < last else 0 for slot in range(active)]
        if how == 0 and full:
            new = [self.upto(2)] * active
            given, limit = (new[0] if new else 1), None
        elif how == 1:
            given, limit = on_device(self.memory, new, self.stream), max(new, default=0) + self.upto(1)
        else:
            given, limit = (new if self.chance(0.5) else np.array(new, np.int32)), None
        most = [count if limit is None else limit for count in new]
        options = {} if limit is None else {"max_increment": int(limit)}
        if any(bound + count > self.longest for bound, count in zip(self.cache.lengths.upper_bounds, most, strict=True)):
            with pytest.raises(CapacityError):
                self.cache.commit_sequence_length(given, **options)
            return
        for slot in range(first, last):
            self.step(slot, new[slot])
        if self.recurrent and full:
            self.cache.swap()
            self.states.reverse()
        elif self.recurrent and first < last:
            self.cache.copy_back(first, last - first)
            self.states[0][first:last] = self.states[1][first:last]
        self.cache.commit_sequence_length(given, **options)
        self.lengths = [length + count for length, count in zip(self.lengths, new, strict=True)]
        self.blurred |= limit is not None

    def clear(self):
        if self.lengths:
            slot = self.upto(len(self.lengths) - 1)
            self.cache.clear_slot(slot)
            self.zero(slot)

    def rewind(self):
        if self.lengths and not self.blurred:
            slot = self.upto(len(self.lengths) - 1)
            length = self.upto(self.lengths[slot])
            if self.recurrent:
                with pytest.raises(ConfigError, match="recurrent states cannot go back"):
                    self.cache.rewind(slot, length)
            else:
                self.cache.rewind(slot, length)
                self.lengths[slot] = length

    def sync(self):
        self.cache.sync_lengths(stream=self.stream)
        self.blurred = False

    def compact(self):
        old = len(self.lengths)
        kept = [slot for slot in range(old) if self.chance(0.7)]
        device = self.chance(0.3)
        order = kept if device else self.random.permutation(kept).astype(int).tolist()
        mapping = [order.index(slot) if slot in kept else -1 for slot in range(old)]
        given = on_device(self.memory, mapping, self.stream) if device else mapping
        for seq, slot in [*self.places.items()]:
            if slot < old and (len(kept) < old if device else mapping[slot] < 0 and slot < len(kept)):
                self.lose(seq)
            elif slot < old and mapping[slot] >= 0:
                self.places[seq] = mapping[slot]
        self.resize([0] * len(kept))
        self.cache.compact_batch(given, old, len(kept))
        moved = [self.live(slot) for slot in order]
        self.lengths, self.blurred = [self.lengths[slot] for slot in order], self.blurred or device
        for slot, (tokens, states) in enumerate(moved):
            self.tokens[slot], self.states[0][slot] = tokens, states

    def capture(self):
        slot = self.upto(self.slots - 1)
        if self.states[0][slot] is not None:
            length = self.upto(len(self.tokens[slot]))
            parts = {"kv_cache": self.cache.capture_kv_cache(slot, length)}
            if self.recurrent:
                parts["recurrent_states"] = self.cache.capture_recurrent_states(slot)
                parts["conv_states"] = self.cache.capture_conv_states(slot)
            self.saved[3:] = []
            self.saved.insert(0, (parts, self.tokens[slot][:length], self.states[0][slot]))

    def restore(self):
        fitting = [one for one in self.saved if len(one[1]) <= self.longest]
        if fitting:
            parts, tokens, states = fitting[self.random.integers(0, len(fitting))]
            slot = self.target()
            for part, tensors in parts.items():
                getattr(self.cache, f"restore_{part}")(tensors, slot)
            self.put(slot, tokens, states)

    def target(self):
        slot = self.upto(self.slots - 1)
        if slot >= len(self.lengths):
            self.forget_sequences()
        return slot

    def put(self, slot, tokens, states):
        self.tokens[slot][: len(tokens)] = tokens
        self.states[0][slot] = states

    def snapshot(self):
        """Save an active slot to a file, and restore it in a slot of this cache or of the other."""
        if not self.lengths or self.blurred:
            return
        slot, into = self.upto(len(self.lengths) - 1), self if self.chance(0.5) else self.other
        tokens, states = self.live(slot)
        if len(tokens) <= into.longest:
            save_snapshot(self.path, self.cache._manager, slot, tokens=range(len(tokens)), model=MODEL, stream=self.stream)
            to = into.target()
            loaded = load_snapshot(self.path, into.cache._manager, to, model=MODEL, stream=into.stream)
            assert loaded.reused_tokens == len(tokens)
            if tokens:
                into.put(to, tokens, states)
            into.compare()

    def forget_sequences(self):
        """Look at all of them, and be done: what comes next may take their slots."""
        self.sync()
        for seq in self.held:
            self.check_sequence(seq)
        if self.seqs is not None:
            self.seqs.close()
            self.pinned.clear()
            self.forget_inactive()
        self.seqs, self.held, self.places = None, {}, {}

    def inside(self, seq):
        return self.places.get(seq, self.slots) < len(self.lengths)

    def content(self, seq):
        return self.live(self.places[seq]) if self.inside(seq) else self.held[seq]

    def live(self, slot):
        return self.tokens[slot][: self.lengths[slot]], self.states[0][slot]

    def waiting_in(self, slot):
        places = slots_of(self.seqs) if self.seqs else {}
        return next((seq for seq, place in places.items() if place == slot), None)

    def lose(self, seq):
        self.lost.append(seq)
        del self.held[seq]
        self.places.pop(seq, None)
        self.pinned.discard(seq)

    def would_empty_a_pinned_sequence(self, lengths):
        """Whether a slot enters the active batch without tokens, in which a pinned sequence waits with some."""
        entering = [(slot, self.waiting_in(slot)) for slot in range(len(self.lengths), len(lengths))]
        return any(not lengths[slot] and seq in self.pinned and self.held[seq][0] for slot, seq in entering)

    def resize(self, lengths):
        """Before slots leave or enter the active batch: those that enter get so many tokens."""
        old, new = len(self.lengths), len(lengths)
        for seq, slot in [*self.places.items()]:
            if new <= slot < old:
                self.held[seq] = self.content(seq)
                if self.cache.lengths.upper_bounds[slot] and not self.lengths[slot]:
                    self.lose(seq)  # it may have tokens, for all that the host knows
                    self.seqs.destroy_sequence(self.lost.pop())
                elif seq not in self.pinned:
                    del self.places[seq]
        for slot in range(old, new):
            seq = self.waiting_in(slot)
            moves_away = seq is not None and seq not in self.pinned and (lengths[slot] or self.held[seq][0])
            if seq is not None and not moves_away:
                self.places[seq] = slot

    def sequence(self):
        self.sync()
        self.seqs = self.seqs or On(SequenceCacheManager(self.cache._manager, enable_swapping=True, swap_threshold=0.7), self.stream)
        for name in self.random.choice(["create", "append", "get", "truncate", "pin", "unpin", "destroy", "use", "use"], 6):
            seq = int(self.random.choice([*self.held])) if self.held else -1
            if name == "create" or not self.held:
                self.held.update((new, ([], None)) for new in self.does(-1, self.seqs.create_sequence))
            elif name == "destroy":
                self.lose(seq)
                self.seqs.destroy_sequence(self.lost.pop())
            else:
                getattr(self, f"{name}_sequence")(seq)
            assert [self.seqs.length(seq) for seq in self.held] == [len(self.content(seq)[0]) for seq in self.held]
            self.forget_inactive()

    def forget_inactive(self):
        if self.seqs is None:
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

    def does(self, seq, call, error=None):
        """Call it, and return what it returned in a list; an empty one if it must be refused, as where it can have no slot.

        It can if it has one already, or if one is inactive, and no other is pinned there.
        """
        if not error and not self.fits(seq) and slots_of(self.seqs).get(seq) is None:
            error = CapacityError
        if not error:
            return [call()]
        with pytest.raises(error):
            call()
        return []

    def get_sequence(self, seq):
        if self.does(seq, lambda: self.seqs.get(seq)):
            self.check_sequence(seq)

    def check_sequence(self, seq):
        if not self.fits(seq):
            return
        tokens, _ = self.content(seq)
        for which, arrays in enumerate(self.seqs.get(seq)):
            for layer, array in enumerate(arrays):
                assert array.shape[1] == len(tokens)
                if tokens:
                    assert np.array_equal(self.bytes_of(array), np.stack([token[layer][which] for token in tokens], axis=1))

    def append_sequence(self, seq):
        tokens, _ = self.content(seq)
        new, count = self.new_tokens(4), int(self.random.choice([0, 1, 2, 4]))
        dtype = numpy_dtype(self.cache.kv_config.dtype if self.cache.kv_config else "float32")
        layers = [np.stack(layer, axis=2).view(dtype)[:, :, :count] for layer in zip(*new, strict=True)]
        pair = [layer[0] for layer in layers], [layer[1] for layer in layers]
        del new[count:]
        error = ConfigError if self.recurrent else CapacityError if len(tokens) + len(new) > self.longest else None
        if self.does(seq, lambda: self.seqs.append(seq, *pair), error):
            if self.inside(seq):
                slot, length = self.places[seq], len(tokens)
                self.tokens[slot][length : length + len(new)] = new
                self.lengths[slot] += len(new)
            else:
                tokens += new

    def truncate_sequence(self, seq):
        tokens, _ = self.content(seq)
        length = self.upto(len(tokens))
        if self.does(seq, lambda: self.seqs.truncate(seq, length), ConfigError if self.recurrent else None):
            if self.inside(seq):
                self.lengths[self.places[seq]] = length
            else:
                tokens[length:] = []

    def pin_sequence(self, seq):
        for place in self.does(seq, lambda: self.seqs.pin(seq)):
            assert place == self.places.get(seq, place)
            assert self.inside(seq) or place >= len(self.lengths)
            self.pinned.add(seq)
            self.places[seq] = place
            if not self.content(seq)[0]:
                self.states[0][place] = self.zeros()

    def unpin_sequence(self, seq):
        self.held[seq] = self.content(seq)
        self.seqs.unpin(seq)
        self.pinned.discard(seq)
        self.places.pop(seq, None)

    def use_sequence(self, seq):
        """Bring it into an active slot, let an engine add a token, and put it away, or leave it there."""
        free = sorted({*range(len(self.lengths))} - {*self.places.values()})
        if self.inside(seq) or not free:
            return
        slot, (tokens, states) = int(self.random.choice(free)), self.held[seq]
        self.cache.clear_slot(slot)
        self.zero(slot)
        assert self.seqs.pin(seq, slot=slot) == slot
        self.lengths[slot], self.tokens[slot], self.places[seq] = len(tokens), list(tokens), slot
        self.pinned.add(seq)
        if tokens and self.recurrent:
            self.states[0][slot] = states
        self.forget_inactive()
        self.compare()
        if len(tokens) < self.longest:
            self.step(slot, 1)
            if self.recurrent:
                self.cache.copy_back(slot, 1)
                self.states[0][slot] = self.states[1][slot]
            self.cache.commit_sequence_length([int(other == slot) for other in range(len(self.lengths))])
            self.lengths[slot] += 1
        if self.chance(0.5):
            self.unpin_sequence(seq)

    def compare(self):
        cache = self.cache
        self.memory.synchronize(self.stream)
        self.forget_inactive()
        while self.lost:
            with pytest.raises(SequenceError, match="its tokens are gone"):
                self.seqs.length(self.lost[-1])
            self.seqs.destroy_sequence(self.lost.pop())
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
        caches[0].other, caches[1].other = caches[::-1]
        for name, seed in [("activate", 9), *operations]:
            which = seed % 4 == 3
            caches[0].random = caches[1].random = np.random.default_rng(seed)
            getattr(caches[which], name)()
            caches[which].compare()
        for each in caches:
            each.forget_sequences()
            each.compare()
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


def test_what_runs_where_a_sequence_waited_is_not_its_own(memory, tmp_path):
    """A slot is reset to some tokens of the sequence that moves out of it, and runs on; then the sequence is used."""
    operations = [("sequence", 16376), ("reset", 11646), ("commit", 49826), ("sequence", 14837)]
    run(memory, tmp_path / "slot", ("linear", {"num_mamba_layers": 0}), KVLayout.COMBINED, "float16", 1, operations)


@pytest.mark.parametrize("part", range(4))
def test_programs(memory, tmp_path, part):
    check(memory, tmp_path / "slot", range(part, PROGRAMS, 4))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_programs(tmp_path, part):
    check(HostMemory(), tmp_path / "slot", range(PROGRAMS + part, PROGRAMS + 10_000, 20))
