"""The prompt cache: what it finds, the bytes that it restores, what it drops, and what is refused."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from cache_cases import (
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
from hybrid_model import HybridModel, hybrid_cache
from hypothesis import given
from hypothesis import strategies as st
from simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin

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
from trt_kvcache.prompt_cache import PromptCache, PromptMatch

PLACES = pytest.mark.parametrize("place", ["cache", "host"])
PLENTY = 1 << 20


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
    with cache_holding(kind, memory, stream, *map(len, entries)) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        made = [prompts.insert(tokens, slot, stream=stream) for slot, tokens in enumerate(entries)]
        assert [entry.tokens.tolist() for entry in made] == entries
        for prompt, expected in cases:
            match = prompts.find(prompt)
            assert (match and (made.index(match.entry), match.length)) == expected, prompt
            assert match is None or prompts.entries[-1] is match.entry, "it is the one used last"
        misses = sum(expected is None for _, expected in cases)
        assert (prompts.hits, prompts.misses, prompts.reused_tokens) == (0, misses, 0)
        assert prompts.insert(entries[1], 1 if kind == "hybrid" else 0, stream=stream) is made[1] is prompts.entries[-1]
        with pytest.raises(ValueError, match="read-only"):
            prompts.entries[0].tokens[0] = 9


@PLACES
@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@LAYOUTS
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_was_inserted_is_restored(memory, stream, place, kind, layout, dtype):
    cache = cache_holding(kind, memory, stream, 1, 0, 6, layout=layout, dtype=dtype)
    before = memory.live_nbytes
    prompts = PromptCache(cache, max_bytes=PLENTY, place=place)
    tokens = [5, 0, 7, 1, 2, 3]
    taken = Image(cache)
    prompts.insert(tokens, 2, stream=stream)
    taken.check(cache)
    gc.collect()
    assert memory.live_nbytes - before == (prompts.nbytes if place == "cache" else 0)
    for prompt, slot in (([*tokens, 9], 4), ([*tokens[:4], 9, 9], 1)):
        fill_all(cache, stream, slot)
        match, expected = prompts.find(prompt), Image(cache)
        if kind != "manager" and slot == 1:
            assert match is None
            continue
        assert match.length == (6 if slot == 4 else 4)
        expected.move(slot, taken, 2, match.length)
        prompts.restore(match, slot, stream=stream)
        expected.check(cache)
    assert cache.host_kv_cache_lengths == (1, 0, 6)
    assert (prompts.hits, prompts.misses, prompts.reused_tokens) == ((2, 0, 10) if kind == "manager" else (1, 1, 6))
    del match
    prompts.clear()
    assert (prompts.nbytes, prompts.entries, memory.live_nbytes) == (0, (), before)


def test_off_by_default(memory, stream):
    with cache_holding("hybrid", memory, stream, 4) as cache, PromptCache(cache) as prompts, Unchanged(cache):
        assert prompts.insert([1, 2, 3, 4], 0, stream=stream) is prompts.find([1, 2, 3, 4, 5]) is None
        assert (prompts.max_bytes, prompts.nbytes, prompts.entries, prompts.hits, prompts.misses) == (0, 0, (), 0, 0)


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
        prompts = PromptCache(cache, max_bytes=limit, place=place)
        made = {prompts.insert([first, 2, 3], 0, stream=stream): name for first, name in ((2, "B"), (1, "A"), (4, "C"))}
        memory.failures, memory.error = failures, error
        with nullcontext() if error is CapacityError else pytest.raises(error):
            assert (prompts.insert(new, 0, stream=stream) is not None) == ("N" in entries)
        assert ("".join(made.get(entry, "N") for entry in prompts.entries), memory.failures) == (entries, left)


def test_arguments_that_change_nothing(memory, stream):
    with cache_holding("hybrid", memory, stream, 4, 3) as cache, cache_holding("manager", memory, stream, 4) as plain:
        prompts, others = (PromptCache(each, max_bytes=PLENTY) for each in (cache, plain))
        good = [1, 2, 3, 4]
        entry, other = (each.insert(good, 0, stream=stream) for each in (prompts, others))
        copy, foreign = prompts.copy_to_host(entry, stream=stream), others.copy_to_host(other, stream=stream)
        match = prompts.find([*good, 5])
        insert, insert_copy, restore = (partial(call, stream=stream) for call in (prompts.insert, prompts.insert_copy, prompts.restore))
        nested, wide = "tokens: expected one sequence of token ids (n,), got a nested one.", "tokens: expected token ids that are integers"
        for call, arguments, error, text in [
            (insert, ([], 0), ShapeError, "tokens: expected at least one, got none."),
            (insert, ([[1], 2], 0), ShapeError, nested),
            (insert, ([1.0], 0), DTypeError, f"{wide} of at most 64 bits, got float64."),
            (prompts.find, ([3, -1],), RangeError, "tokens: expected token ids from 0 to 2147483647, got -1 to 3."),
            (insert, (good, 2), SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (insert, (good, 1), RangeError, "tokens: slot 1 holds 3; expected exactly as many, as its states are those"),
            (partial(others.insert, stream=stream), ([*good, 5], 0), RangeError, "tokens: slot 0 holds 4; expected no more, got 5."),
            (insert_copy, ([1, 2, 3], copy), ShapeError, "tokens: expected 4, as many as were copied, got 3."),
            (insert_copy, (good, foreign), ShapeError, "copy: recurrent layers: expected 2, got 0. It was made of another cache."),
            (restore, (match, 5), SlotError, "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap."),
            (restore, (PromptMatch(entry, 3), 0), RangeError, "tokens to restore: expected an integer from 4 to 4, got 3."),
            (
                partial(others.restore, stream=stream),
                (PromptMatch(other, 5), 0),
                RangeError,
                "tokens to restore: expected an integer from 0",
            ),
            (restore, (PromptMatch(other, 4), 0), ClosedError, "this entry is not held here: it was dropped since it was found, or"),
            (partial(PromptCache, max_bytes=-1), (cache,), RangeError, "PromptCache.max_bytes: expected at least 0, got -1."),
            (partial(PromptCache, place="disk"), (cache,), ConfigError, "PromptCache.place: expected one of cache, host, got 'disk'."),
            (PromptCache, (memory,), ConfigError, "cache: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got "),
            (partial(prompts.insert, stream=None), (good, 0), PlaceError, "stream: expected"),
            (partial(prompts.restore, stream=None), (match, 0), PlaceError, "stream: expected"),
        ]:
            with Unchanged(cache), Unchanged(plain), pytest.raises(error) as caught:
                call(*arguments)
            assert str(caught.value).startswith(text)
        assert (prompts.entries, prompts.reused_tokens) == ((entry,), 0)
        cache.commit_sequence_length(on_device(memory, [1, 1], stream), max_increment=1, stream=stream)
        with pytest.raises(LengthsUnknown):
            insert(good, 0)
    for call in (lambda: insert(good, 0), lambda: prompts.find(good)):
        with pytest.raises(ClosedError, match=r"^this PromptCache's cache is closed\.$"):
            call()
    for _ in range(2):
        prompts.close()
    assert prompts.nbytes == 0
    for call in (lambda: prompts.find(good), lambda: restore(match, 0), prompts.__enter__):
        with pytest.raises(ClosedError, match=r"^this PromptCache is closed\.$"):
            call()


@PLACES
def test_a_copy_with_other_scales_is_refused(place):
    memory = HostMemory()
    stream, caches = memory.create_stream(), []
    for scale in (0.5, 2.0):
        caches.append(make_cache("manager", memory, layers=[KVLayerConfig(num_kv_heads=2, head_dim=16, v_scale=scale)], dtype="int8"))
        caches[-1].reset_for_new_sequences([3], stream=stream)
        prompts = PromptCache(caches[-1], max_bytes=PLENTY, place=place)
        copy = prompts.copy_to_host(prompts.insert([1, 2, 3], 0, stream=stream), stream=stream)
        assert PromptCache(caches[-1], max_bytes=PLENTY, place=place).insert_copy([1, 2, 3], copy, stream=stream)
    prompts = PromptCache(caches[0], max_bytes=PLENTY, place=place)
    with pytest.raises(ShapeError, match=r"^copy: v_scale of attention layer 0: expected 0\.5, got 2\.0\. It was made of another cache\.$"):
        prompts.insert_copy([1, 2, 3], copy, stream=stream)
    assert prompts.entries == ()


@PLACES
def test_nothing_of_it_is_captured_in_a_graph(place):
    memory = CapturingMemory()
    stream = memory.create_stream()
    with cache_holding("hybrid", memory, stream, 4) as cache:
        prompts = PromptCache(cache, max_bytes=PLENTY, place=place)
        entry = prompts.insert([1, 2, 3, 4], 0, stream=stream)
        match, copy, new = prompts.find([1, 2, 3, 4, 5]), prompts.copy_to_host(entry, stream=stream), [2, 2, 3, 4]
        memory.capturing = True
        for name, arguments in {"insert": (new, 0), "insert_copy": (new, copy), "restore": (match, 1), "copy_to_host": (entry,)}.items():
            with Unchanged(cache), pytest.raises(CaptureError, match=r"cannot be captured"):
                getattr(prompts, name)(*arguments, stream=stream)
        assert prompts.entries == (entry,)


@needs_standin
def test_restore_from_the_memory_of_the_cache_neither_waits_nor_allocates(memory, stream):
    with cache_holding("hybrid", memory, stream, 4) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        prompts.insert([1, 2, 3, 4], 0, stream=stream)
        for _ in range(2):  # the first one loads the kernels
            match, standin = prompts.find([1, 2, 3, 4, 5]), StandIn()
            prompts.restore(match, 1, stream=stream)
            made = standin.take_calls()
        assert not {*made} & (WAITS | ALLOCATIONS)
        assert sum(call.startswith("cuLaunchKernel") for call in made) == 4  # two head dims, two kinds of states
        prompts.insert([1, 2, 3, 4], 0, stream=stream)
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
        prompts = PromptCache(cache, max_bytes=limit * 4)
        sizes = [0, *(prompts._format.nbytes(count) for count in range(1, 8))]
        oracle = Oracle(sizes, limit * 4, whole)
        for what, tokens in program:
            if what == "insert":
                cache.reset_for_new_sequences([len(tokens)], stream=stream)
                prompts.insert(tokens, 0, stream=stream)
                oracle.insert(tuple(tokens))
            else:
                match = prompts.find(tokens)
                assert (match.length if match else 0) == oracle.find(tuple(tokens))
            assert [tuple(entry.tokens.tolist()) for entry in prompts.entries] == oracle.held
            assert prompts.nbytes == sum(sizes[len(entry)] for entry in oracle.held) <= prompts.max_bytes


PREFIX = [3, 17, 5, 29, 11, 2, 23, 8]


def continuation(prompt):
    """What the hybrid model says without any cache of prompts."""
    with hybrid_cache(HostMemory()) as cache:
        cache.reset_for_new_sequences([0], stream=cache.memory.create_stream())
        return HybridModel(cache).generate(0, prompt, 7)


@PLACES
def test_a_hybrid_model_goes_on_from_an_exact_position(place):
    memory = HostMemory()
    with hybrid_cache(memory) as cache, PromptCache(cache, max_bytes=PLENTY, place=place) as prompts:
        model, stream = HybridModel(cache), memory.create_stream()
        cache.reset_for_new_sequences([0], stream=stream)
        model.run(0, PREFIX[:-1])
        prompts.insert(PREFIX[:-1], 0, stream=stream)  # captured at N - 1
        tokens, _ = model.generate(0, PREFIX[-1:], 7)
        assert len(set(tokens)) > 3
        prompts.insert(PREFIX + tokens, 0, stream=stream)  # and where the answer ends, for a next turn
        for prompt, reused in (
            (PREFIX, 7),
            ([*PREFIX, *tokens, 31, 6], 15),
            ([*PREFIX, *tokens[:3], 31], 7),  # states after 11 tokens are not there: those after 7 are
            (PREFIX[:-1], 0),  # states after 7 tokens are those that its last token would be run on too late
        ):
            fill_all(cache, stream)
            cache.reset_for_new_sequences([0, 0], stream=stream)
            match = prompts.find(prompt)
            assert (match.length if match else 0) == reused
            if match:
                prompts.restore(match, 1, stream=stream)
                cache.commit_sequence_length([0, match.length], stream=stream)
            got, expected = model.generate(1, prompt[reused:], 7), continuation(prompt)
            assert got[0] == expected[0]
            assert np.array_equal(got[1], expected[1])
