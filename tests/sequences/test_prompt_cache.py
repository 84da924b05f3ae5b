"""The prompt cache: what it finds, the bytes that it restores, what it drops, and what is refused."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cache_cases import (
    LAYOUTS,
    SEQUENCE_KINDS,
    CapturingMemory,
    FailingMemory,
    Image,
    Unchanged,
    cache_holding,
    fill_all,
    make_cache,
    on_device,
)
from tests.helpers.hybrid_model import HybridModel, hybrid_cache
from tests.sequences.test_sequence_cache_manager import On
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache import HostMemory, KVLayerConfig
from trt_kvcache.errors import (
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    DTypeError,
    LengthsUnknown,
    PlaceError,
    RangeError,
    ShapeError,
    SlotError,
)
from trt_kvcache.sequences.prompt_cache import PromptCache, PromptMatch

PLACES = pytest.mark.parametrize("place", ["cache", "host"])
PLENTY = 1 << 20


def prompts_of(cache, stream, max_bytes=PLENTY, **options):
    return On(PromptCache(cache, max_bytes=max_bytes, **options), stream)


@pytest.mark.parametrize(
    ("kind", "entries", "cases"),
    [
        (
            "manager",
            [[1, 2, 3, 4, 5, 6], [1, 2, 9, 4], [7, 2, 3]],
            [
                ([1, 2, 3, 4, 5, 6, 7], (0, 6)),
                ([1, 2, 3, 4, 5, 6], (0, 5)),  # one token is always run
                (np.array([1, 2, 9, 4, 5], np.int64), (1, 4)),
                ([2, 1, 3, 4, 5, 6], None),  # the same tokens in another order
            ],
        ),
        ("hybrid", [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 4]], [([1, 2, 3, 4, 5, 6], (1, 5)), ([1, 2, 3, 4, 6], (0, 3)), ([1, 2, 3], None)]),
    ],
)
def test_what_is_found(memory, stream, kind, entries, cases):
    """The longest prefix, token by token; states after 5 tokens are not those after 4, so that with them entries are taken whole."""
    with cache_holding(kind, memory, stream, *map(len, entries)) as cache, prompts_of(cache, stream) as pc:
        made = [pc.insert(tokens, slot) for slot, tokens in enumerate(entries)]
        assert [entry.tokens.tolist() for entry in made] == entries
        for prompt, want in cases:
            match = pc.find(prompt)
            assert (match and (made.index(match.entry), match.length)) == want, prompt
            assert match is None or pc.entries[-1] is match.entry, "it is the one used last"
        misses = sum(want is None for _, want in cases)
        assert (pc.hits, pc.misses, pc.reused_tokens) == (0, misses, 0)
        assert pc.insert(entries[1], 1 if kind == "hybrid" else 0) is made[1] is pc.entries[-1]
        with pytest.raises(ValueError, match="read-only"):
            pc.entries[0].tokens[0] = 9


@PLACES
@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@LAYOUTS
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_was_inserted_is_restored(memory, stream, place, kind, layout, dtype):
    cache = cache_holding(kind, memory, stream, 1, 0, 6, layout=layout, dtype=dtype)
    before = memory.live_nbytes
    pc = prompts_of(cache, stream, place=place)
    tokens = [5, 0, 7, 1, 2, 3]
    taken = Image(cache)
    pc.insert(tokens, 2)
    taken.check(cache)
    gc.collect()
    assert memory.live_nbytes - before == (pc.nbytes if place == "cache" else 0)
    for prompt, slot in (([*tokens, 9], 4), ([*tokens[:4], 9, 9], 1)):
        fill_all(cache, stream, slot)
        match, want = pc.find(prompt), Image(cache)
        if kind != "manager" and slot == 1:
            assert match is None
            continue
        assert match.length == (6 if slot == 4 else 4)
        want.move(slot, taken, 2, match.length)
        pc.restore(match, slot)
        want.check(cache)
    assert cache.host_kv_cache_lengths == (1, 0, 6)
    assert (pc.hits, pc.misses, pc.reused_tokens) == ((2, 0, 10) if kind == "manager" else (1, 1, 6))
    del match
    pc.clear()
    assert (pc.nbytes, pc.entries, memory.live_nbytes) == (0, (), before)


def test_off_by_default(memory, stream):
    with cache_holding("hybrid", memory, stream, 4) as cache, PromptCache(cache) as pc, Unchanged(cache):
        assert pc.insert([1, 2, 3, 4], 0, stream=stream) is pc.find([1, 2, 3, 4, 5]) is None
        assert (pc.max_bytes, pc.nbytes, pc.entries, pc.hits, pc.misses) == (0, 0, (), 0, 0)


@PLACES
@pytest.mark.parametrize(
    ("limit", "new", "failures", "error", "entries", "left"),
    [
        (3584, [1, 2, 3, 4, 5], 0, CapacityError, "BCN", 0),  # A, which N begins with, is of no use any more
        (3584, [1, 2, 3, 4, 5], 2, CapacityError, "CN", 0),
        (3584, [1, 2, 3, 4, 5], 9, CapacityError, "C", 6),  # A and B together were larger than N
        (3584, [9], 1, CapacityError, "ACN", 0),
        (2304, [1, 2, 3, 4, 5], 0, CapacityError, "CN", 0),  # A is not enough
        (2304, [1, 2, 3, 4, 5], 9, CapacityError, "C", 8),
        (3584, [1, 2, 3, 4, 5], 1, KeyboardInterrupt, "BAC", 0),
    ],
)
def test_it_drops_no_more_than_makes_room(place, limit, new, failures, error, entries, left):
    memory = FailingMemory()
    stream = memory.create_stream()
    with make_cache("manager", memory, heads=[(4, 16)]) as cache:  # 256 bytes per token
        cache.reset_for_new_sequences([7], stream=stream)
        pc = prompts_of(cache, stream, limit, place=place)
        made = {pc.insert([first, 2, 3], 0): name for first, name in ((2, "B"), (1, "A"), (4, "C"))}
        memory.failures, memory.error = failures, error
        with nullcontext() if error is CapacityError else pytest.raises(error):
            assert (pc.insert(new, 0) is not None) == ("N" in entries)
        assert ("".join(made.get(entry, "N") for entry in pc.entries), memory.failures) == (entries, left)


def test_arguments_that_change_nothing(memory, stream):
    with cache_holding("hybrid", memory, stream, 4, 3) as cache, cache_holding("manager", memory, stream, 4) as plain:
        pc, others = (prompts_of(each, stream) for each in (cache, plain))
        good = [1, 2, 3, 4]
        entry, other = (each.insert(good, 0) for each in (pc, others))
        copy, foreign = pc.copy_to_host(entry), others.copy_to_host(other)
        match = pc.find([*good, 5])
        insert, insert_copy, restore = pc.insert, pc.insert_copy, pc.restore
        nested, wide = "tokens: expected one sequence of token ids (n,), got a nested one.", "tokens: expected token ids that are integers"
        for call, args, error, text in [
            (insert, ([], 0), ShapeError, "tokens: expected at least one, got none."),
            (insert, ([[1], 2], 0), ShapeError, nested),
            (insert, ([1.0], 0), DTypeError, f"{wide} of at most 64 bits, got float64."),
            (pc.find, ([3, -1],), RangeError, "tokens: expected token ids from 0 to 2147483647, got -1 to 3."),
            (insert, (good, 2), SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (insert, (good, 1), RangeError, "tokens: slot 1 holds 3; expected exactly as many, as its states are those"),
            (others.insert, ([*good, 5], 0), RangeError, "tokens: slot 0 holds 4; expected no more, got 5."),
            (insert_copy, ([1, 2, 3], copy), ShapeError, "tokens: expected 4, as many as were copied, got 3."),
            (insert_copy, (good, foreign), ShapeError, "copy: recurrent layers: expected 2, got 0. It was made of another cache."),
            (restore, (match, 5), SlotError, "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
            (restore, (PromptMatch(entry, 3), 0), RangeError, "tokens to restore: expected an integer from 4 to 4, got 3."),
            (others.restore, (PromptMatch(other, 5), 0), RangeError, "tokens to restore: expected an integer from 0"),
            (restore, (PromptMatch(other, 4), 0), ClosedError, "this entry is not held here: it was dropped since it was found, or"),
            (partial(PromptCache, max_bytes=-1), (cache,), RangeError, "PromptCache.max_bytes: expected at least 0, got -1."),
            (partial(PromptCache, place="disk"), (cache,), ConfigError, "PromptCache.place: expected one of cache, host, got 'disk'."),
            (PromptCache, (memory,), ConfigError, "cache: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got "),
            (partial(pc.insert, stream=None), (good, 0), PlaceError, "stream: expected"),
            (partial(pc.restore, stream=None), (match, 0), PlaceError, "stream: expected"),
        ]:
            with Unchanged(cache), Unchanged(plain), pytest.raises(error) as caught:
                call(*args)
            assert str(caught.value).startswith(text)
        assert (pc.entries, pc.reused_tokens) == ((entry,), 0)
        cache.commit_sequence_length(on_device(memory, [1, 1], stream), max_increment=1, stream=stream)
        with pytest.raises(LengthsUnknown):
            insert(good, 0)
    for call in (lambda: insert(good, 0), lambda: pc.find(good)):
        with pytest.raises(ClosedError, match=r"^this PromptCache's cache is closed\.$"):
            call()
    for _ in range(2):
        pc.close()
    assert pc.nbytes == 0
    for call in (lambda: pc.find(good), lambda: restore(match, 0), pc.__enter__):
        with pytest.raises(ClosedError, match=r"^this PromptCache is closed\.$"):
            call()


@PLACES
def test_a_copy_with_other_scales_is_refused(place):
    memory = HostMemory()
    stream, caches = memory.create_stream(), []
    for scale in (0.5, 2.0):
        caches.append(make_cache("manager", memory, layers=[KVLayerConfig(num_kv_heads=2, head_dim=16, v_scale=scale)], dtype="int8"))
        caches[-1].reset_for_new_sequences([3], stream=stream)
        pc = prompts_of(caches[-1], stream, place=place)
        copy = pc.copy_to_host(pc.insert([1, 2, 3], 0))
        assert prompts_of(caches[-1], stream, place=place).insert_copy([1, 2, 3], copy)
    pc = prompts_of(caches[0], stream, place=place)
    with pytest.raises(ShapeError, match=r"^copy: v_scale of attention layer 0: expected 0\.5, got 2\.0\. It was made of another cache\.$"):
        pc.insert_copy([1, 2, 3], copy)
    assert pc.entries == ()


@PLACES
def test_nothing_of_it_is_captured_in_a_graph(place):
    memory = CapturingMemory()
    stream = memory.create_stream()
    with cache_holding("hybrid", memory, stream, 4) as cache:
        pc = prompts_of(cache, stream, place=place)
        entry = pc.insert([1, 2, 3, 4], 0)
        match, copy, new = pc.find([1, 2, 3, 4, 5]), pc.copy_to_host(entry), [2, 2, 3, 4]
        memory.capturing = True
        for name, args in {"insert": (new, 0), "insert_copy": (new, copy), "restore": (match, 1), "copy_to_host": (entry,)}.items():
            with Unchanged(cache), pytest.raises(CaptureError, match=r"cannot be captured"):
                getattr(pc, name)(*args)
        assert pc.entries == (entry,)


@needs_standin
def test_restore_neither_waits_nor_allocates(memory, stream):
    with cache_holding("hybrid", memory, stream, 4) as cache, prompts_of(cache, stream) as pc:
        pc.insert([1, 2, 3, 4], 0)
        for _ in range(2):  # the first one loads the kernels
            match, standin = pc.find([1, 2, 3, 4, 5]), StandIn()
            pc.restore(match, 1)
            made = standin.take_calls()
        assert not {*made} & (WAITS | ALLOCATIONS)
        assert sum(call.startswith("cuLaunchKernel") for call in made) == 4  # two head dims, two kinds of states
        pc.insert([1, 2, 3, 4], 0)
        assert {*standin.take_calls()} <= {"cuStreamIsCapturing"}  # it is there


class Oracle:
    """Entries as tuples of tokens, the least recently used first. An entry of n tokens takes ``sizes[n]`` bytes."""

    def __init__(self, sizes, limit, whole):
        self.sizes, self.limit, self.whole = sizes, limit, whole
        self.held = []

    def serves(self, entry, prompt):
        best = max(count for count in range(len(entry) + 1) if entry[:count] == prompt[:count] and count < max(len(prompt), 1))
        return best if best == len(entry) or not self.whole else 0

    def find(self, prompt):
        lengths = [self.serves(entry, prompt) for entry in self.held]
        best = max(lengths, default=0)
        if best:
            self.held.append(self.held.pop(lengths.index(best)))
        return best

    def insert(self, tokens):
        same = [entry for entry in self.held if entry == tokens or (not self.whole and entry[: len(tokens)] == tokens)]
        if same:
            self.held.remove(same[0])
            self.held.append(same[0])
        elif self.sizes[len(tokens)] <= self.limit:
            self.held = [entry for entry in self.held if self.whole or tokens[: len(entry)] != entry]
            while sum(self.sizes[len(entry)] for entry in self.held) + self.sizes[len(tokens)] > self.limit:
                self.held.pop(0)
            self.held.append(tokens)


PROGRAMS = st.lists(st.tuples(st.sampled_from(["insert", "find"]), st.lists(st.integers(0, 1), min_size=1, max_size=7)), max_size=20)


@given(st.booleans(), st.integers(1, 5000), PROGRAMS)
def test_random_programs(whole, limit, program):
    memory = HostMemory()
    stream = memory.create_stream()
    with make_cache("linear" if whole else "manager", memory) as cache:
        pc = prompts_of(cache, stream, limit * 4)
        sizes = [0, *(pc._format.nbytes(count) for count in range(1, 8))]
        oracle = Oracle(sizes, limit * 4, whole)
        for what, tokens in program:
            if what == "insert":
                cache.reset_for_new_sequences([len(tokens)], stream=stream)
                pc.insert(tokens, 0)
                oracle.insert(tuple(tokens))
            else:
                match = pc.find(tokens)
                assert (match.length if match else 0) == oracle.find(tuple(tokens))
            assert [tuple(entry.tokens.tolist()) for entry in pc.entries] == oracle.held
            assert pc.nbytes == sum(sizes[len(entry)] for entry in oracle.held) <= pc.max_bytes


PREFIX = [3, 17, 5, 29, 11, 2, 23, 8]


def continuation(prompt):
    with hybrid_cache(HostMemory()) as cache:
        cache.reset_for_new_sequences([0], stream=cache.memory.create_stream())
        return HybridModel(cache).generate(0, prompt, 7)


@PLACES
def test_a_hybrid_model_goes_on_exactly(place):
    memory = HostMemory()
    stream = memory.create_stream()
    with hybrid_cache(memory) as cache, prompts_of(cache, stream, place=place) as pc:
        model = HybridModel(cache)
        cache.reset_for_new_sequences([0], stream=stream)
        model.run(0, PREFIX[:-1])
        pc.insert(PREFIX[:-1], 0)  # captured at N - 1
        tokens, _ = model.generate(0, PREFIX[-1:], 7)
        assert len(set(tokens)) > 3
        pc.insert(PREFIX + tokens, 0)  # and where the answer ends, for a next turn
        for prompt, reused in (
            (PREFIX, 7),
            ([*PREFIX, *tokens, 31, 6], 15),
            ([*PREFIX, *tokens[:3], 31], 7),  # states after 11 tokens are not there: those after 7 are
            (PREFIX[:-1], 0),  # states after 7 tokens are those that its last token would be run on too late
        ):
            fill_all(cache, stream)
            cache.reset_for_new_sequences([0, 0], stream=stream)
            match = pc.find(prompt)
            assert (match.length if match else 0) == reused
            if match:
                pc.restore(match, 1)
                cache.commit_sequence_length([0, match.length], stream=stream)
            got, want = model.generate(1, prompt[reused:], 7), continuation(prompt)
            assert got[0] == want[0]
            assert np.array_equal(got[1], want[1])
