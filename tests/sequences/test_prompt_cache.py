"""The prompt cache: what it finds, the bytes that it restores, what it drops, and what is refused."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.cache_cases import SEQUENCE_KINDS, CapturingMemory, Image, Unchanged, cache_holding, fill_all, make_cache
from tests.helpers.hybrid_model import VOCAB, HybridModel, hybrid_cache
from tests.simt.standin import ALLOCATIONS, WAITS, StandIn, needs_standin
from trt_kvcache import HostMemory, KVCacheConfig, KVCacheManager, KVLayerConfig, KVLayout
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


def look_up(prompts, tokens):
    """The tokens that were found, and how many of them to reuse."""
    match = prompts.find(tokens)
    return None if match is None else (match.entry.tokens.tolist(), match.length)


# --- what is found ---


def test_the_longest_prefix_is_found_token_by_token(memory, stream):
    with cache_holding("manager", memory, stream, 6) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        first, second, third = [1, 2, 3, 4, 5, 6], [1, 2, 9, 4], [7, 2, 3]
        for tokens in (first, second, third):
            assert prompts.insert(tokens, 0, stream=stream).tokens.tolist() == tokens
        for prompt, expected in [
            ([1, 2, 3, 4, 5, 6, 7], (first, 6)),
            (first, (first, 5)),  # one token is always run
            ([1, 2, 3, 4, 8, 6, 7], (first, 4)),
            (np.array([1, 2, 9, 4, 5], np.int64), (second, 4)),
            ((1, 2, 9, 9), (second, 3)),
            ([7, 2, 3, 4, 5, 6, 7], (third, 3)),
            ([2, 1, 3, 4, 5, 6], None),  # the same tokens in another order
            ([7], None),
            ([8, 2, 3, 4, 5, 6, 7], None),
            ([], None),
        ]:
            assert look_up(prompts, prompt) == expected, prompt
        assert (prompts.hits, prompts.misses, prompts.reused_tokens) == (0, 4, 0)  # what is found may not be restored
        with pytest.raises(ValueError, match="read-only"):
            prompts.entries[0].tokens[0] = 9


def test_with_recurrent_layers_only_whole_entries_are_found(memory, stream):
    with cache_holding("hybrid", memory, stream, 3, 5, 3) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        short, long = [1, 2, 3], [1, 2, 3, 4, 5]
        for slot, tokens in enumerate((short, long, [1, 2, 4])):
            prompts.insert(tokens, slot, stream=stream)
        assert len(prompts.entries) == 3  # none serves the prompts of another
        for prompt, expected in [
            ([1, 2, 3, 4, 5, 6], (long, 5)),
            (long, (short, 3)),  # states after 5 tokens are not those after 4
            ([1, 2, 3, 4, 6], (short, 3)),
            ([1, 2, 3, 4], (short, 3)),
            (short, None),
            ([1, 2, 9, 4], None),
        ]:
            assert look_up(prompts, prompt) == expected, prompt
        for tokens in ([1, 2], [1, 2, 3, 4]):
            with pytest.raises(RangeError, match=rf"^tokens: slot 0 holds 3; expected exactly as many, as .* got {len(tokens)}\.$"):
                prompts.insert(tokens, 0, stream=stream)


# --- the bytes ---


@PLACES
@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
@pytest.mark.parametrize("layout", list(KVLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_was_inserted_is_restored(memory, stream, place, kind, layout, dtype):
    cache = cache_holding(kind, memory, stream, 1, 0, 6, layout=layout, dtype=dtype)
    prompts = PromptCache(cache, max_bytes=PLENTY, place=place)
    tokens = [5, 0, 7, 1, 2, 3]
    taken = Image(cache)
    prompts.insert(tokens, 2, stream=stream)
    taken.check(cache)
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
    cache.close()


@PLACES
@pytest.mark.parametrize("kind", SEQUENCE_KINDS)
def test_bytes_are_counted_and_given_back(memory, stream, place, kind):
    with cache_holding(kind, memory, stream, 4, 5) as cache:
        before = memory.live_nbytes
        prompts = PromptCache(cache, max_bytes=PLENTY, place=place)
        for slot, tokens in enumerate(([1, 2, 3, 4], [9, 2, 3, 4, 5])):
            prompts.insert(tokens, slot, stream=stream)
        assert prompts.nbytes == sum(entry.nbytes for entry in prompts.entries) > 0
        gc.collect()
        assert memory.live_nbytes - before == (prompts.nbytes if place == "cache" else 0)
        prompts.restore(prompts.find([1, 2, 3, 4, 5]), 0, stream=stream)
        assert prompts.nbytes > prompts.entries[0].nbytes
        prompts.clear()
        assert (prompts.nbytes, prompts.entries, prompts.hits, memory.live_nbytes) == (0, (), 1, before)


# --- the limit ---


def test_the_least_recently_used_go_first(memory, stream):
    with cache_holding("manager", memory, stream, 4) as cache:
        size = PromptCache(cache, max_bytes=PLENTY).insert([0] * 4, 0, stream=stream).nbytes
        assert size == 2048
        prompts = PromptCache(cache, max_bytes=3 * size + size // 2)

        def held():
            return [int(entry.tokens[0]) for entry in prompts.entries]

        entries = {first: prompts.insert([first, 5, 5, 5], 0, stream=stream) for first in (1, 2, 3)}
        prompts.find([1, 5, 5, 5])
        assert held() == [2, 3, 1]
        assert prompts.insert([2, 5], 0, stream=stream) is entries[2]  # already there
        assert held() == [3, 1, 2]
        prompts.insert([4, 5, 5, 5], 0, stream=stream)
        assert (held(), prompts.nbytes) == ([1, 2, 4], 3 * size)
        prompts.insert([6], 0, stream=stream)
        assert (held(), prompts.nbytes) == ([1, 2, 4, 6], 3 * 2048 + 768)
        prompts.insert([7, 7], 0, stream=stream)
        assert (held(), prompts.nbytes) == ([2, 4, 6, 7], 2 * 2048 + 768 + 1280)
        exact = PromptCache(cache, max_bytes=2 * size)
        assert all(exact.insert([first, 5, 5, 5], 0, stream=stream) in exact.entries for first in (1, 2))
        assert len(exact.entries) == 2
        with pytest.raises(ClosedError, match=r"^this prompt cache does not hold the entry: it was dropped since it was found"):
            prompts.restore(PromptMatch(entries[3], 2), 0, stream=stream)


def test_an_entry_that_another_begins_with_is_dropped(memory, stream):
    with cache_holding("manager", memory, stream, 6) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        for tokens in ([1, 2], [3], [1, 2, 3, 4], [1, 2, 3]):
            prompts.insert(tokens, 0, stream=stream)
        assert [entry.tokens.tolist() for entry in prompts.entries] == [[3], [1, 2, 3, 4]]


def test_what_is_larger_than_the_limit_is_not_kept_and_drops_nothing(memory, stream):
    with cache_holding("manager", memory, stream, 6) as cache:
        one, six = (PromptCache(cache, max_bytes=PLENTY).insert([1] * count, 0, stream=stream).nbytes for count in (1, 6))
        prompts = PromptCache(cache, max_bytes=six - 1)
        kept = prompts.insert([1], 0, stream=stream)
        with Unchanged(cache):
            assert prompts.insert([1, 2, 3, 4, 5, 6], 0, stream=stream) is None
        assert (prompts.entries, prompts.nbytes) == ((kept,), one)


def test_off_by_default(memory, stream):
    with cache_holding("hybrid", memory, stream, 4) as cache, PromptCache(cache) as prompts, Unchanged(cache):
        assert prompts.insert([1, 2, 3, 4], 0, stream=stream) is None
        assert prompts.find([1, 2, 3, 4, 5]) is None
        assert (prompts.max_bytes, prompts.nbytes, prompts.entries, prompts.hits, prompts.misses) == (0, 0, (), 0, 0)


def test_without_recurrent_layers_a_slot_may_hold_more(memory, stream):
    with cache_holding("manager", memory, stream, 4) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
        prompts.insert([1, 2, 3], 0, stream=stream)
        with pytest.raises(RangeError, match=r"^tokens: slot 0 holds 4; expected no more, got 5\.$"):
            prompts.insert([1, 2, 3, 4, 5], 0, stream=stream)
        match = prompts.find([1, 2, 3, 4])
        with Unchanged(cache), pytest.raises(RangeError, match=r"^tokens to restore: expected an integer from 0 to 3, got 4\.$"):
            prompts.restore(PromptMatch(match.entry, 4), 0, stream=stream)


@PLACES
def test_nothing_of_it_is_captured_in_a_graph(place):
    memory = CapturingMemory()
    stream = memory.create_stream()
    with cache_holding("hybrid", memory, stream, 4) as cache:
        prompts = PromptCache(cache, max_bytes=PLENTY, place=place)
        entry = prompts.insert([1, 2, 3, 4], 0, stream=stream)
        match = prompts.find([1, 2, 3, 4, 5])
        copy = prompts.copy_to_host(entry, stream=stream)
        memory.capturing = True
        for call in (
            lambda: prompts.insert([2, 2, 3, 4], 0, stream=stream),
            lambda: prompts.insert_copy([2, 2, 3, 4], copy, stream=stream),
            lambda: prompts.restore(match, 1, stream=stream),
            lambda: prompts.copy_to_host(entry, stream=stream),
        ):
            with Unchanged(cache), pytest.raises(CaptureError, match=r"cannot be captured"):
                call()
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


# --- beside an oracle ---


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


@given(
    st.booleans(),
    st.integers(1, 5000),
    st.lists(st.tuples(st.sampled_from(["insert", "find"]), st.lists(st.integers(0, 1), min_size=1, max_size=7)), max_size=20),
)
def test_random_programs(whole, limit, program):
    memory = HostMemory()
    stream = memory.create_stream()
    kind = "linear" if whole else "manager"
    with make_cache(kind, memory) as cache:
        cache.reset_for_new_sequences([7], stream=stream)
        measure = PromptCache(cache, max_bytes=PLENTY)
        sizes = [0, *(measure._format.nbytes(count) for count in range(1, 8))]
        prompts, oracle = PromptCache(cache, max_bytes=limit * 4), Oracle(sizes, limit * 4, whole)
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


# --- a model that goes on ---

PREFIX = [3, 17, 5, 29, 11, 2, 23, 8]


def continuation(prompt, count=7):
    """What the hybrid model says without any cache of prompts."""
    with hybrid_cache(HostMemory()) as cache:
        cache.reset_for_new_sequences([0], stream=cache.memory.create_stream())
        return HybridModel(cache).generate(0, prompt, count)


def poison(cache):
    for view in (
        cache.get_combined_kv_cache(1),
        *(get(index) for index in (0, 2) for get in (cache.get_recurrent_state, cache.get_conv_state)),
    ):
        cache.memory.array(view)[...] = np.nan


@PLACES
def test_a_hybrid_model_goes_on_from_an_exact_position(place):
    memory = HostMemory()
    with hybrid_cache(memory) as cache, PromptCache(cache, max_bytes=PLENTY, place=place) as prompts:
        model, stream = HybridModel(cache), memory.create_stream()
        cache.reset_for_new_sequences([0], stream=stream)
        model.run(0, PREFIX[:-1])
        prompts.insert(PREFIX[:-1], 0, stream=stream)  # captured at N - 1
        tokens, logits = model.generate(0, PREFIX[-1:], 7)
        assert len(set(tokens)) > 3
        expected, expected_logits = continuation(PREFIX)
        assert tokens == expected
        assert np.array_equal(logits, expected_logits)
        prompts.insert(PREFIX + tokens, 0, stream=stream)  # and where the answer ends, for a next turn
        for prompt, reused in (
            (PREFIX, 7),
            ([*PREFIX[:-1], 19, 4], 7),
            ([*PREFIX, *tokens, 31, 6], 15),
            ([*PREFIX, *tokens[:3], 31], 7),  # states after 11 tokens are not there: those after 7 are
            (PREFIX[:-2], 0),
            (PREFIX[:-1], 0),  # states after 7 tokens are those that its last token would be run on too late
            ([PREFIX[0] + 1, *PREFIX[1:]], 0),
        ):
            poison(cache)
            cache.reset_for_new_sequences([0, 0], stream=stream)
            match = prompts.find(prompt)
            assert (match.length if match else 0) == reused
            if match:
                prompts.restore(match, 1, stream=stream)
                cache.commit_sequence_length([0, match.length], stream=stream)
            got, got_logits = model.generate(1, prompt[reused:], 7)
            expected, expected_logits = continuation(prompt)
            assert got == expected
            assert np.array_equal(got_logits, expected_logits)


def test_states_of_another_position_would_be_wrong():
    """Why the rule is there: states after N tokens, of which N - 1 are reused, run the last token twice."""
    memory = HostMemory()
    with hybrid_cache(memory) as cache:
        model, stream = HybridModel(cache), memory.create_stream()
        cache.reset_for_new_sequences([0], stream=stream)
        model.run(0, PREFIX)
        kv, recurrent, conv = (
            cache.capture_kv_cache(0, len(PREFIX) - 1, stream=stream),
            cache.capture_recurrent_states(0, stream=stream),
            cache.capture_conv_states(0, stream=stream),
        )
        cache.reset_for_new_sequences([0], stream=stream)
        cache.restore_kv_cache(kv, 0, stream=stream)
        cache.restore_recurrent_states(recurrent, 0, stream=stream)
        cache.restore_conv_states(conv, 0, stream=stream)
        cache.commit_sequence_length(len(PREFIX) - 1, stream=stream)
        wrong = model.run(0, PREFIX[-1:])
        assert wrong.shape == (VOCAB,)
        assert np.abs(wrong - continuation(PREFIX, 1)[1][0]).max() > 0.1


class FailingMemory(HostMemory):
    """Host memory whose next ``failures`` allocations raise ``error``."""

    failures, error = 0, CapacityError

    def __getattribute__(self, name):
        if name in ("allocate", "staging") and self.failures:
            self.failures -= 1
            raise self.error("no room.")
        return super().__getattribute__(name)


@PLACES
@pytest.mark.parametrize(
    ("limit", "new", "failures", "error", "entries", "left"),
    [
        (3584, [1, 2, 3, 4, 5], 0, CapacityError, "BCN", 0),  # A, which N begins with, is of no use any more
        (3584, [1, 2, 3, 4, 5], 1, CapacityError, "BCN", 0),
        (3584, [1, 2, 3, 4, 5], 2, CapacityError, "CN", 0),
        (3584, [1, 2, 3, 4, 5], 9, CapacityError, "C", 6),  # A and B together were larger than N
        (3584, [9], 1, CapacityError, "ACN", 0),
        (3584, [9], 9, CapacityError, "AC", 7),
        (2304, [1, 2, 3, 4, 5], 0, CapacityError, "CN", 0),  # A is not enough
        (2304, [1, 2, 3, 4, 5], 9, CapacityError, "C", 8),
        (3584, [1, 2, 3, 4, 5], 1, KeyboardInterrupt, "BAC", 0),
        (2304, [1, 2, 3, 4, 5], 1, KeyboardInterrupt, "C", 0),
    ],
)
def test_it_drops_no_more_than_makes_room(place, limit, new, failures, error, entries, left):
    memory = FailingMemory()
    stream = memory.create_stream()
    layers = [KVLayerConfig(num_kv_heads=4, head_dim=16)]  # 256 bytes per token
    config = KVCacheConfig(layers=layers, max_batch_size=2, max_sequence_length=7, dtype="float16")
    with KVCacheManager(config, memory=memory) as cache:
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
            (insert, ("1234", 0), ShapeError, "tokens: expected a sequence of token ids, got str."),
            (insert, ([], 0), ShapeError, "tokens: expected at least one, got none."),
            (insert, ([[1], [2]], 0), ShapeError, nested),
            (insert, ([[1], 2], 0), ShapeError, nested),
            (insert, ([1.0], 0), DTypeError, f"{wide} of at most 64 bits, got float64."),
            (prompts.find, ([True],), DTypeError, f"{wide} of at most 64 bits, got bool."),
            (prompts.find, ([3, -1],), RangeError, "tokens: expected token ids from 0 to 2147483647, got -1 to 3."),
            (prompts.find, ([1 << 31],), RangeError, "tokens: expected token ids from 0 to 2147483647, got 2147483648"),
            (insert, (good, 2), SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (insert, (good, -1), SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (insert, (good, 1), RangeError, "tokens: slot 1 holds 3; expected exactly as many, as its states are those"),
            (insert, ([1, 2], 1), RangeError, "tokens: slot 1 holds 3; expected exactly as many, as its states are those"),
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
            (
                restore,
                (PromptMatch(other, 4), 0),
                ClosedError,
                "this prompt cache does not hold the entry: it was dropped since it was found, or",
            ),
            (partial(PromptCache, max_bytes=-1), (cache,), RangeError, "PromptCache.max_bytes: expected at least 0, got -1."),
            (partial(PromptCache, place="disk"), (cache,), ConfigError, "PromptCache.place: expected one of cache, host, got 'disk'."),
            (PromptCache, (memory,), ConfigError, "cache: expected a KVCacheManager, LinearKVCache or HybridCacheManager, got "),
            (partial(prompts.insert, stream=None), (good, 0), PlaceError, "stream: expected"),
            (partial(prompts.insert_copy, stream=None), ([9, 9, 9, 9], copy), PlaceError, "stream: expected"),
            (partial(prompts.restore, stream=None), (match, 0), PlaceError, "stream: expected"),
            (partial(prompts.copy_to_host, stream=None), (entry,), PlaceError, "stream: expected"),
        ]:
            with Unchanged(cache), Unchanged(plain), pytest.raises(error) as caught:
                call(*arguments)
            assert str(caught.value).startswith(text)
        assert (prompts.entries, prompts.reused_tokens) == ((entry,), 0)
        cache.commit_sequence_length(memory.to_device(np.ones(2, np.int32), stream=stream), max_increment=1, stream=stream)
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
        layers = [KVLayerConfig(num_kv_heads=2, head_dim=16, v_scale=scale)]
        config = KVCacheConfig(layers=layers, max_batch_size=1, max_sequence_length=7, dtype="int8")
        caches.append(KVCacheManager(config, memory=memory))
        caches[-1].reset_for_new_sequences([3], stream=stream)
        prompts = PromptCache(caches[-1], max_bytes=PLENTY, place=place)
        copy = prompts.copy_to_host(prompts.insert([1, 2, 3], 0, stream=stream), stream=stream)
        assert PromptCache(caches[-1], max_bytes=PLENTY, place=place).insert_copy([1, 2, 3], copy, stream=stream)
    prompts = PromptCache(caches[0], max_bytes=PLENTY, place=place)
    with pytest.raises(ShapeError, match=r"^copy: v_scale of attention layer 0: expected 0\.5, got 2\.0\. It was made of another cache\.$"):
        prompts.insert_copy([1, 2, 3], copy, stream=stream)
    assert prompts.entries == ()
