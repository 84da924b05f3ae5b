"""The prompt cache: what it finds, the bytes that it restores, what it drops, and what is refused."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.helpers.assertions import raises
from tests.helpers.caches import SEQUENCE_KINDS, CapturingMemory, Image, Unchanged, cache_holding, fill_all, make_cache, on_device
from tests.sequences.hybrid_model import VOCAB, HybridModel, hybrid_cache
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


class TestFind:
    """Without states any part of an entry serves; at least one token of a prompt is run."""

    ENTRIES = FIRST, SECOND, THIRD = [1, 2, 3, 4, 5, 6], [1, 2, 9, 4], [7, 2, 3]

    @pytest.fixture
    def prompts(self, memory, stream):
        with cache_holding("manager", memory, stream, 6) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
            for tokens in self.ENTRIES:
                prompts.insert(tokens, 0, stream=stream)
            yield prompts

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ([1, 2, 3, 4, 5, 6, 7], (FIRST, 6)),
            (FIRST, (FIRST, 5)),  # one token is always run
            ([1, 2, 3, 4, 8, 6, 7], (FIRST, 4)),
            (np.array([1, 2, 9, 4, 5], np.int64), (SECOND, 4)),
            ((1, 2, 9, 9), (SECOND, 3)),
            ([7, 2, 3, 4, 5, 6, 7], (THIRD, 3)),
        ],
    )
    def test_the_longest_prefix(self, prompts, prompt, expected):
        assert look_up(prompts, prompt) == expected

    @pytest.mark.parametrize("prompt", [[2, 1, 3, 4, 5, 6], [7], [8, 2, 3, 4, 5, 6, 7], []])
    def test_nothing_is_shared(self, prompts, prompt):
        assert prompts.find(prompt) is None

    def test_entries_of_another_adapter_are_not_found(self, prompts, stream):
        prompts.insert([1, 2, 3, 4], 0, adapter="a", stream=stream)
        assert look_up(prompts, [1, 2, 3, 4, 5, 6, 7]) == (self.FIRST, 6)
        found = prompts.find([1, 2, 3, 4, 5, 6, 7], "a")
        assert (found.entry.tokens.tolist(), found.entry.adapter, found.length) == ([1, 2, 3, 4], "a", 4)
        assert prompts.find([7, 2, 3, 4], "a") is None
        prompts.insert([1, 2, 3, 4, 5, 6], 0, adapter="a", stream=stream)
        assert sorted(str(entry.adapter) for entry in prompts.entries) == ["None", "None", "None", "a"]
        assert prompts.find([1, 2, 3, 4, 5, 6, 7], "a").length == 6, "it has replaced the shorter one of its adapter"

    def test_misses_are_counted(self, prompts):
        for prompt in ([9, 9], [], [1, 2]):
            prompts.find(prompt)
        assert (prompts.hits, prompts.misses) == (0, 2)

    def test_a_match_is_a_hit_when_it_is_restored(self, prompts, stream):
        match = prompts.find([*self.FIRST, 7])
        assert (prompts.hits, prompts.reused_tokens) == (0, 0)
        prompts.restore(match, 1, stream=stream)
        assert (prompts.hits, prompts.reused_tokens) == (1, 6)

    def test_what_was_found_was_used_last(self, prompts):
        prompts.find([*self.SECOND, 7])
        assert [entry.tokens.tolist() for entry in prompts.entries] == [self.FIRST, self.THIRD, self.SECOND]

    def test_tokens_of_an_entry_are_read_only(self, prompts):
        with pytest.raises(ValueError, match="read-only"):
            prompts.entries[0].tokens[0] = 9


class TestFindWithStates:
    """States after five tokens are not those after four: entries serve whole or not at all."""

    SHORT, LONG = [1, 2, 3], [1, 2, 3, 4, 5]

    @pytest.fixture
    def prompts(self, memory, stream):
        with cache_holding("hybrid", memory, stream, 3, 5, 3) as cache, PromptCache(cache, max_bytes=PLENTY) as prompts:
            for slot, tokens in enumerate((self.SHORT, self.LONG, [1, 2, 4])):
                prompts.insert(tokens, slot, stream=stream)
            yield prompts

    def test_an_entry_that_another_begins_with_stays(self, prompts):
        assert len(prompts.entries) == 3  # none serves the prompts of another

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ([1, 2, 3, 4, 5, 6], (LONG, 5)),
            (LONG, (SHORT, 3)),
            ([1, 2, 3, 4, 6], (SHORT, 3)),
            ([1, 2, 3, 4], (SHORT, 3)),
        ],
    )
    def test_the_longest_entry_that_a_prompt_goes_on_from(self, prompts, prompt, expected):
        assert look_up(prompts, prompt) == expected

    @pytest.mark.parametrize("prompt", [SHORT, [1, 2, 9, 4], [1, 2]])
    def test_a_part_of_an_entry_does_not_serve(self, prompts, prompt):
        assert prompts.find(prompt) is None


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
        if kind not in ("manager", "scaled") and slot == 1:
            assert match is None
            continue
        assert match.length == (6 if slot == 4 else 4)
        expected.move(slot, taken, 2, match.length)
        prompts.restore(match, slot, stream=stream)
        expected.check(cache)
    assert cache.host_kv_cache_lengths == (1, 0, 6)
    assert (prompts.hits, prompts.misses, prompts.reused_tokens) == ((2, 0, 10) if kind in ("manager", "scaled") else (1, 1, 6))
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
        assert memory.live_nbytes - before == (prompts.nbytes if place == "cache" else 0)
        prompts.restore(prompts.find([1, 2, 3, 4, 5]), 0, stream=stream)
        assert prompts.nbytes > prompts.entries[0].nbytes
        prompts.clear()
        assert (prompts.nbytes, prompts.entries, prompts.hits, memory.live_nbytes) == (0, (), 1, before)


class TestLimit:
    """Entries of four tokens take 2048 bytes each."""

    @pytest.fixture
    def cache(self, memory, stream):
        with cache_holding("manager", memory, stream, 4) as cache:
            yield cache

    @pytest.fixture
    def prompts(self, cache, stream):
        """Three entries of four tokens, and room for half of one more."""
        prompts = PromptCache(cache, max_bytes=3 * 2048 + 1024)
        for first in (1, 2, 3):
            prompts.insert([first, 5, 5, 5], 0, stream=stream)
        return prompts

    def held(self, prompts):
        """The first token of each entry, the least recently used one first."""
        return [int(entry.tokens[0]) for entry in prompts.entries]

    def test_the_least_recently_used_one_is_dropped(self, prompts, stream):
        prompts.insert([4, 5, 5, 5], 0, stream=stream)
        assert (self.held(prompts), prompts.nbytes) == ([2, 3, 4], 3 * 2048)

    def test_none_is_dropped_where_there_is_room(self, prompts, stream):
        prompts.insert([6], 0, stream=stream)
        assert (self.held(prompts), prompts.nbytes) == ([1, 2, 3, 6], 3 * 2048 + 768)

    def test_one_that_was_found_is_kept(self, prompts, stream):
        prompts.find([1, 5, 5, 5])
        prompts.insert([4, 5, 5, 5], 0, stream=stream)
        assert self.held(prompts) == [3, 1, 4]

    def test_one_that_is_inserted_again_is_kept(self, prompts, stream):
        first = prompts.entries[0]
        assert prompts.insert([1, 5], 0, stream=stream) is first
        prompts.insert([4, 5, 5, 5], 0, stream=stream)
        assert self.held(prompts) == [3, 1, 4]

    def test_the_limit_itself_is_used(self, cache, stream):
        prompts = PromptCache(cache, max_bytes=2 * 2048)
        for first in (1, 2):
            prompts.insert([first, 5, 5, 5], 0, stream=stream)
        assert self.held(prompts) == [1, 2]

    def test_a_match_whose_entry_was_dropped_is_not_restored(self, prompts, cache, stream):
        match = prompts.find([1, 5, 5, 5])
        for first in (4, 6, 7):
            prompts.insert([first, 5, 5, 5], 0, stream=stream)
        with (
            Unchanged(cache),
            pytest.raises(ClosedError, match=r"^this prompt cache does not hold the entry: it was dropped since it was found"),
        ):
            prompts.restore(match, 0, stream=stream)


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
        with raises(RangeError, "tokens: slot 0 holds 4", expected="no more", got=5):
            prompts.insert([1, 2, 3, 4, 5], 0, stream=stream)
        match = prompts.find([1, 2, 3, 4])
        with Unchanged(cache), raises(RangeError, "tokens to restore", expected="0 to 3", got=4):
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


class Refused:
    """A cache with states, whose slots hold four and three tokens, one without, and a prompt cache of one entry over each."""

    good = (1, 2, 3, 4)

    def __init__(self, memory, stream):
        self.stream = stream
        self.cache, self.plain = cache_holding("hybrid", memory, stream, 4, 3), cache_holding("manager", memory, stream, 4)
        self.prompts, self.others = (PromptCache(cache, max_bytes=PLENTY) for cache in (self.cache, self.plain))
        self.entry, self.other = (prompts.insert(self.good, 0, stream=stream) for prompts in (self.prompts, self.others))
        self.copy = self.prompts.copy_to_host(self.entry, stream=stream)
        self.match = self.prompts.find([*self.good, 5])

    def insert(self, tokens, slot=0):
        return self.prompts.insert(tokens, slot, stream=self.stream)

    def restore(self, match, slot=0):
        self.prompts.restore(match, slot, stream=self.stream)


@pytest.fixture
def refused(memory, stream):
    made = Refused(memory, stream)
    yield made
    made.cache.close()
    made.plain.close()


NESTED, WIDE = "tokens: expected one sequence of token ids (n,), got a nested one.", "tokens: expected token ids that are integers"
STATES = "tokens: slot 1 holds 3; expected exactly 3, as its states depend on all of them"
BAD = {
    "a text": (lambda on: on.insert("1234"), ShapeError, "tokens: expected a sequence of token ids, got str."),
    "no tokens": (lambda on: on.insert([]), ShapeError, "tokens: expected at least one, got none."),
    "tokens in two dimensions": (lambda on: on.insert([[1], [2]]), ShapeError, NESTED),
    "tokens of several depths": (lambda on: on.insert([[1], 2]), ShapeError, NESTED),
    "floats": (lambda on: on.insert([1.0]), DTypeError, f"{WIDE} of at most 64 bits, got float64."),
    "truths": (lambda on: on.prompts.find([True]), DTypeError, f"{WIDE} of at most 64 bits, got bool."),
    "a token below 0": (
        lambda on: on.prompts.find([3, -1]),
        RangeError,
        "tokens: expected token ids from 0 to 2147483647, got -1 to 3.",
    ),
    "a token past int32": (
        lambda on: on.prompts.find([1 << 31]),
        RangeError,
        "tokens: expected token ids from 0 to 2147483647, got 2147483648",
    ),
    "a slot that is not active": (
        lambda on: on.insert(on.good, 2),
        SlotError,
        "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap.",
    ),
    "a slot below 0": (
        lambda on: on.insert(on.good, -1),
        SlotError,
        "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap.",
    ),
    "more tokens than states are of": (lambda on: on.insert(on.good, 1), RangeError, STATES),
    "fewer tokens than states are of": (lambda on: on.insert([1, 2], 1), RangeError, STATES),
    "more tokens than a slot holds": (
        lambda on: on.others.insert([*on.good, 5], 0, stream=on.stream),
        RangeError,
        "tokens: slot 0 holds 4; expected no more, got 5.",
    ),
    "fewer tokens than were copied": (
        lambda on: on.prompts.insert_copy([1, 2, 3], on.copy, stream=on.stream),
        ShapeError,
        "tokens: expected 4, the length of the copy, got 3.",
    ),
    "a copy of another cache": (
        lambda on: on.prompts.insert_copy(on.good, on.others.copy_to_host(on.other, stream=on.stream), stream=on.stream),
        ShapeError,
        "copy: recurrent layers: expected 2, got 0. It was made of another cache.",
    ),
    "a slot past the last": (
        lambda on: on.restore(on.match, 5),
        SlotError,
        "slot 5: expected 0 <= slot < 5 (batch slots). Slots never wrap.",
    ),
    "a part of an entry with states": (
        lambda on: on.restore(PromptMatch(on.entry, 3)),
        RangeError,
        "tokens to restore: expected an integer from 4 to 4, got 3.",
    ),
    "more than an entry": (
        lambda on: on.others.restore(PromptMatch(on.other, 5), 0, stream=on.stream),
        RangeError,
        "tokens to restore: expected an integer from 0",
    ),
    "an entry of another prompt cache": (
        lambda on: on.restore(PromptMatch(on.other, 4)),
        ClosedError,
        "this prompt cache does not hold the entry: it was dropped since it was found, or",
    ),
    "insert without a stream": (lambda on: on.prompts.insert(on.good, 0, stream=None), PlaceError, "stream: expected"),
    "insert_copy without a stream": (
        lambda on: on.prompts.insert_copy([9, 9, 9, 9], on.copy, stream=None),
        PlaceError,
        "stream: expected",
    ),
    "restore without a stream": (lambda on: on.prompts.restore(on.match, 0, stream=None), PlaceError, "stream: expected"),
    "copy_to_host without a stream": (lambda on: on.prompts.copy_to_host(on.entry, stream=None), PlaceError, "stream: expected"),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD.values(), ids=BAD)
def test_what_is_refused_changes_nothing(refused, call, error, text):
    with Unchanged(refused.cache), Unchanged(refused.plain), pytest.raises(error) as caught:
        call(refused)
    assert str(caught.value).startswith(text)
    assert (refused.prompts.entries, refused.prompts.reused_tokens) == ((refused.entry,), 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_bytes": -1}, RangeError, "PromptCache.max_bytes: expected at least 0, got -1."),
        ({"place": "disk"}, ConfigError, "PromptCache.place: expected one of cache, host, got 'disk'."),
    ],
)
def test_how_it_may_not_be_made(memory, options, error, text):
    with pytest.raises(error) as caught:
        PromptCache(make_cache("manager", memory), **options)
    assert str(caught.value) == text


def test_it_is_over_a_cache_of_whole_sequences(memory):
    with raises(ConfigError, "cache", expected="KVCacheManager, LinearKVCache or HybridCacheManager", got="MambaCacheManager"):
        PromptCache(make_cache("mamba", memory))


def test_a_slot_whose_length_only_the_device_knows_is_not_inserted(refused, memory, stream):
    refused.cache.commit_sequence_length(on_device(memory, [1, 1], stream), max_increment=1, stream=stream)
    with pytest.raises(LengthsUnknown):
        refused.insert(refused.good)


@pytest.mark.parametrize("call", [lambda on: on.insert(on.good), lambda on: on.prompts.find(on.good)])
def test_over_a_closed_cache(refused, call):
    refused.cache.close()
    with pytest.raises(ClosedError, match=r"^this PromptCache's cache is closed\.$"):
        call(refused)


def test_close_releases_all_entries(refused):
    refused.prompts.close()
    assert (refused.prompts.closed, refused.prompts.nbytes) == (True, 0)


@pytest.mark.parametrize("call", [lambda on: on.prompts.find(on.good), lambda on: on.restore(on.match), lambda on: on.prompts.__enter__()])
def test_a_closed_one_is_refused(refused, call):
    refused.prompts.close()
    refused.prompts.close()
    with pytest.raises(ClosedError, match=r"^this PromptCache is closed\.$"):
        call(refused)


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
    with raises(ShapeError, "copy: v_scale of attention layer 0", expected="0.5", got="2.0"):
        prompts.insert_copy([1, 2, 3], copy, stream=stream)
    assert prompts.entries == ()
