"""``InferenceSession`` against lists of tokens: what it holds, what it answers, what it refuses.

The engine is the exact one of ``fakes``: its logits are a function of all tokens that it finds in a slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checkpoint.tokenizer_folders import BOS, EOS, byte_level_folder
from fakes import VOCAB, Journal, RecordingCache, RecordingEngine, RecordingMemory, cache_rows, kv_config, logits_after, poison
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import CacheConfig, InferenceSession, KVLayout, LinearKVCache, SamplingParams, TensorNames
from trt_kvcache.checkpoint import Tokenizer
from trt_kvcache.engine import EngineProfile
from trt_kvcache.errors import (
    BindingError,
    CapacityError,
    ClosedError,
    ConfigError,
    EngineError,
    KVCacheError,
    LayoutError,
    RangeError,
    ShapeError,
    SlotError,
)

S = 16


def make(*, slots: int = 3, limit: int = S, **options: Any) -> InferenceSession:
    memory = RecordingMemory(Journal())
    kv = kv_config(slots=slots, limit=limit)
    return InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory), **options)


@pytest.fixture
def session():
    with make() as session:
        yield session


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def greedy(tokens: Sequence[int]) -> int:
    return int(np.argmax(logits_after(tokens)))


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(greedy(tokens))
    return tokens[len(prompt) :]


def by_prompt(events):
    """Tokens, text and reason of each prompt."""
    result: dict[int, list[Any]] = {}
    for event in events:
        entry = result.setdefault(event.index, [[], "", None])
        assert entry[2] is None, "a token came after the last one"
        entry[0].append(event.token)
        entry[1] += event.text
        entry[2] = event.finish_reason
    return [tuple(result[index]) for index in sorted(result)]


def observe(session):
    slots = range(session.cache.active_batch_size)
    return (
        session.cache.host_kv_cache_lengths,
        session.cache.kv_cache_lengths.numpy().tolist(),
        [session.tokens(slot) for slot in slots],
        [session.pending_tokens(slot) for slot in slots],
        cache_rows(session.cache),
        session.statistics,
        len(session.engine.steps),
    )


def refuse(session, kind: type[KVCacheError], call) -> str:
    """Call what must fail; nothing is enqueued and nothing changes; return the text."""
    before = observe(session)
    with pytest.raises(kind) as error:
        call()
    assert observe(session) == before
    return str(error.value)


class TestPrefillAndDecode:
    def test_logits_are_those_of_each_row_alone(self, session):
        rows = [[1, 2, 3, 4, 5, 6], [7], [8, 9]]
        logits = session.prefill(rows)
        assert (logits.dtype, logits.shape) == (np.float32, (3, VOCAB))
        np.testing.assert_array_equal(logits, [logits_after(row) for row in rows])
        logits = session.decode([10, 11, 12])
        assert (logits.dtype, logits.shape) == (np.float32, (3, VOCAB))
        np.testing.assert_array_equal(logits, [logits_after([*row, token]) for row, token in zip(rows, [10, 11, 12], strict=True)])
        assert session.tokens(0) == (1, 2, 3, 4, 5, 6, 10)

    def test_logits_are_the_callers(self, session):
        first = session.prefill([[1], [2]])
        second = session.decode([3, 4])
        copies = first.copy(), second.copy()
        session.decode([5, 6])
        session.prefill([[7], [8]])
        np.testing.assert_array_equal(first, copies[0])
        np.testing.assert_array_equal(second, copies[1])

    def test_a_prefill_begins_anew(self, session):
        session.prefill([[1, 2], [3], [4]])
        session.prefill([[5]])
        assert (session.tokens(0), session.cache.active_batch_size) == ((5,), 1)

    @pytest.mark.parametrize("kind", [tuple, np.array, lambda row: np.array(row, np.int64)])
    def test_any_kind_of_sequence(self, session, kind):
        np.testing.assert_array_equal(session.prefill([kind([1, 2]), kind([3])]), [logits_after([1, 2]), logits_after([3])])
        np.testing.assert_array_equal(session.decode(kind([4, 5])), [logits_after([1, 2, 4]), logits_after([3, 5])])
        assert session.tokens(0) == (1, 2, 4)
        assert all(type(token) is int for token in session.tokens(0))

    def test_an_array_of_prompts(self, session):
        np.testing.assert_array_equal(session.prefill(np.array([[1, 2], [3, 4]])), [logits_after([1, 2]), logits_after([3, 4])])

    def test_a_prompt_as_long_as_the_slot(self, session):
        row = list(range(S))
        np.testing.assert_array_equal(session.prefill([row, [1]]), [logits_after(row), logits_after([1])])

    def test_what_it_is(self, session):
        assert session.vocab_size == VOCAB
        assert session.max_sequence_length == S
        assert session.tokenizer is None
        assert session.defaults == SamplingParams()
        assert session.cache.kv_config == kv_config()
        assert isinstance(session.engine, RecordingEngine)


class TestEngines:
    """What an engine, or a cache, may look like."""

    PROMPTS = ([1, 2, 3, 4, 5, 6], [7])

    def check(self, session, *, tolerance=0.0):
        logits = session.prefill(self.PROMPTS)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, [logits_after(row) for row in self.PROMPTS], rtol=tolerance)
        logits = session.decode([8, 9])
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, [logits_after([*self.PROMPTS[0], 8]), logits_after([7, 9])], rtol=tolerance)

    @pytest.mark.parametrize(
        ("options", "tolerance"),
        [({"index_dtype": "int64"}, 0), ({"logits_dtype": "float16"}, 2**-10), ({"logits_dtype": "bfloat16"}, 2**-7)],
        ids=["int64", "float16", "bfloat16"],
    )
    def test_dtypes(self, options, tolerance):
        memory, kv = RecordingMemory(Journal()), kv_config()
        self.check(InferenceSession(RecordingEngine(kv, memory, **options), RecordingCache(kv, memory=memory)), tolerance=tolerance)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_dtypes_of_the_cache(self, dtype):
        memory, kv = RecordingMemory(Journal()), kv_config(dtype=dtype)
        self.check(InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory)))

    def test_logits_with_a_dimension_for_the_token(self):
        memory, kv = RecordingMemory(Journal()), kv_config()
        engine = RecordingEngine(kv, memory)
        engine.tensors["logits"] = replace(engine.tensors["logits"], shape=(-1, 1, VOCAB))
        self.check(InferenceSession(engine, RecordingCache(kv, memory=memory)))

    def test_other_names(self):
        memory, kv = RecordingMemory(Journal()), kv_config()
        names = TensorNames(input_ids="tokens", k_cache="past_key_{i}", present_v_cache="value_{i}_out")
        self.check(InferenceSession(RecordingEngine(kv, memory, names=names), RecordingCache(kv, memory=memory), names=names))

    def test_one_profile_for_everything(self):
        memory, kv = RecordingMemory(Journal()), kv_config()
        profiles = [EngineProfile(name="any", min_batch=1, max_batch=3, min_width=1, max_width=4)]
        self.check(InferenceSession(RecordingEngine(kv, memory, profiles=profiles), RecordingCache(kv, memory=memory)))

    def test_a_batch_that_no_profile_takes_is_refused_before_anything_changes(self):
        memory, kv = RecordingMemory(Journal()), kv_config()
        profiles = [EngineProfile(name="fixed", min_batch=3, max_batch=3, min_width=1, max_width=4)]
        session = InferenceSession(RecordingEngine(kv, memory, profiles=profiles), RecordingCache(kv, memory=memory))
        session.prefill([[1], [2], [3]])
        assert refuse(session, BindingError, lambda: session.prefill([[1, 2], [3]])) == (
            "no optimisation profile takes 2 slots of 2 new tokens. The engine has fixed: batch 3-3, width 1-4."
        )

    def test_a_linear_cache(self):
        memory = RecordingMemory(Journal())
        config = CacheConfig(
            num_attention_layers=2,
            max_batch_size=3,
            max_sequence_length=7,
            num_kv_heads=2,
            head_dim=8,
            dtype="float32",
            layout=KVLayout.SEPARATE,
        )
        cache = LinearKVCache(config, memory=memory)
        self.check(InferenceSession(RecordingEngine(cache.kv_config, memory), cache))

    def test_one_combined_slot(self):
        memory, kv = RecordingMemory(Journal()), kv_config(slots=1, layout=KVLayout.COMBINED)
        session = InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory))
        np.testing.assert_array_equal(session.prefill([[1, 2, 3, 4, 5]]), [logits_after([1, 2, 3, 4, 5])])

    def test_engine_and_cache_that_do_not_fit_are_left_to_the_caller(self):
        memory = RecordingMemory(Journal())
        engine, cache = RecordingEngine(kv_config(limit=8), memory), RecordingCache(kv_config(), memory=memory)
        before = memory.live_nbytes
        with pytest.raises(BindingError, match=r"max_sequence_length differs \(engine 8, cache 16\)"):
            InferenceSession(engine, cache)
        assert (memory.live_nbytes, engine.closed, cache.closed) == (before, 0, False)


class TestReuse:
    def test_only_what_is_new_is_run(self, session):
        session.prefill([[1, 2, 3, 4], [5, 6]])
        session.decode([7, 8])
        logits = session.prefill([[1, 2, 3, 9, 9], [5, 6, 8, 1]], reuse=True)
        np.testing.assert_array_equal(logits, [logits_after([1, 2, 3, 9, 9]), logits_after([5, 6, 8, 1])])
        assert session.engine.steps[-1].start == [3, 3]
        assert session.statistics.reused_tokens == 6

    def test_at_least_one_token_is_run(self, session):
        session.prefill([[1, 2, 3, 4]])
        np.testing.assert_array_equal(session.prefill([[1, 2, 3]], reuse=True), [logits_after([1, 2, 3])])
        assert session.engine.steps[-1].start == [2]
        assert session.tokens(0) == (1, 2, 3)

    def test_nothing_in_common(self, session):
        session.prefill([[1, 2]])
        np.testing.assert_array_equal(session.prefill([[2, 1]], reuse=True), [logits_after([2, 1])])
        assert session.statistics.reused_tokens == 0

    def test_it_needs_one_prompt_per_slot(self, session):
        session.prefill([[1], [2]])
        assert refuse(session, ShapeError, lambda: session.prefill([[1]], reuse=True)) == (
            "prompts: expected one for each of 2 active slots, got 1."
        )

    def test_pending_tokens_are_not_reused_but_run(self, session):
        list(session.generate([[1, 2]], max_new_tokens=2))
        tokens = [1, 2, *continuation([1, 2], 2), 5]
        np.testing.assert_array_equal(session.prefill([tokens], reuse=True), [logits_after(tokens)])
        assert session.statistics.reused_tokens == 3


class TestAppend:
    def test_turns_are_added(self, session):
        session.prefill([[1, 2], [3]])
        np.testing.assert_array_equal(session.append([[4, 5, 6], [7]]), [logits_after([1, 2, 4, 5, 6]), logits_after([3, 7])])

    def test_a_slot_that_gets_nothing(self, session):
        session.prefill([[1, 2], [3], [4]])
        logits = session.append([[], [5] * 6, []])
        assert np.isnan(logits[[0, 2]]).all()
        np.testing.assert_array_equal(logits[1], logits_after([3, *[5] * 6]))
        np.testing.assert_array_equal(session.decode([1, 1, 1])[2], logits_after([4, 1]))

    def test_no_slot_gets_anything(self, session):
        session.prefill([[1, 2], [3]])
        assert np.isnan(session.append([[], []])).all()

    def test_the_token_that_generate_left_pending_comes_first(self, session):
        list(session.generate([[1, 2], [3]], [SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=1)]))
        first, second = [1, 2, *continuation([1, 2], 3)], [3, *continuation([3], 1)]
        assert (session.tokens(0), session.pending_tokens(0)) == (tuple(first[:-1]), (first[-1],))
        assert (session.tokens(1), session.pending_tokens(1)) == ((3,), (second[-1],))
        np.testing.assert_array_equal(session.append([[8], [9, 9]]), [logits_after([*first, 8]), logits_after([*second, 9, 9])])
        assert (session.tokens(0), session.pending_tokens(0)) == ((*first, 8), ())

    def test_a_slot_that_gets_nothing_keeps_its_pending_token(self, session):
        list(session.generate([[1, 2], [3]], max_new_tokens=1))
        session.append([[], [9]])
        assert session.pending_tokens(0) == tuple(continuation([1, 2], 1))

    def test_decode_takes_the_place_of_pending_tokens(self, session):
        list(session.generate([[1, 2]], max_new_tokens=1))
        np.testing.assert_array_equal(session.decode([9]), [logits_after([1, 2, 9])])
        assert session.pending_tokens(0) == ()

    def test_a_full_slot_stands_before_one_that_gets_a_turn(self, session):
        session.prefill([list(range(S)), [1]])
        np.testing.assert_array_equal(session.append([[], [2, 3]])[1], logits_after([1, 2, 3]))

    def test_a_full_slot_stands_before_one_that_cannot_be_reached(self):
        session = make(limit=7)
        session.prefill([list(range(7)), [1]])
        assert refuse(session, LayoutError, lambda: session.append([[], [2, 3]])).startswith("slot 1: slot 0 before it is full, ")


class TestRewind:
    def test_it_goes_on_from_there(self, session):
        session.prefill([[1, 2, 3, 4], [5, 6]])
        session.rewind(0, 2)
        assert (session.tokens(0), session.tokens(1)) == ((1, 2), (5, 6))
        assert session.cache.host_kv_cache_lengths == (2, 2)
        poison(session.cache)
        np.testing.assert_array_equal(session.append([[7], []])[0], logits_after([1, 2, 7]))

    def test_pending_tokens_are_dropped(self, session):
        list(session.generate([[1, 2], [3]], max_new_tokens=1))
        session.rewind(0, 2)
        assert (session.pending_tokens(0), len(session.pending_tokens(1))) == ((), 1)

    @pytest.mark.parametrize(
        ("slot", "length", "kind", "text"),
        [
            (2, 0, SlotError, "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (-1, 0, SlotError, "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
            (0, 4, RangeError, "rewind: slot 0 holds 3 tokens; expected 0 to 3, got 4."),
            (0, -1, RangeError, "rewind: slot 0 holds 3 tokens; expected 0 to 3, got -1."),
            (0, 1.5, RangeError, "length: expected an integer, got 1.5."),
        ],
    )
    def test_out_of_range(self, session, slot, length, kind, text):
        session.prefill([[1, 2, 3], [4]])
        assert refuse(session, kind, lambda: session.rewind(slot, length)) == text


class TestGenerate:
    def test_each_prompt_is_continued(self, session):
        prompts = [[1, 2, 3, 4, 5], [6], [7, 8]]
        found = by_prompt(session.generate(prompts, max_new_tokens=5))
        assert found == [(continuation(prompt, 5), "", "length") for prompt in prompts]

    def test_tokens_come_as_they_are_made(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        assert session.engine.steps == []
        assert [next(events).index for _ in range(2)] == [0, 1]
        assert len(session.engine.steps) == 1
        next(events)
        assert len(session.engine.steps) == 2
        assert [event.index for event in events] == [1, 0, 1]

    def test_one_prompt_by_itself(self, session):
        assert by_prompt(session.generate([1, 2], max_new_tokens=2))[0][0] == continuation([1, 2], 2)
        assert by_prompt(session.generate(np.array([1, 2]), max_new_tokens=2))[0][0] == continuation([1, 2], 2)

    def test_each_may_have_its_own_parameters(self, session):
        prompts = [[1, 2], [3], [4]]
        stop = continuation([4], 2)[-1]
        params = [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=6), SamplingParams(stop_token_ids=[stop])]
        found = by_prompt(session.generate(prompts, params))
        assert found[:2] == [(continuation([1, 2], 2), "", "length"), (continuation([3], 6), "", "length")]
        assert found[2] == (continuation([4], continuation([4], 2).index(stop) + 1), "", "stop")

    def test_one_set_of_parameters_for_all(self, session):
        found = by_prompt(session.generate([[1], [2]], SamplingParams(max_new_tokens=2)))
        assert [len(tokens) for tokens, _, _ in found] == [2, 2]

    def test_end_tokens_of_the_model(self):
        end = continuation([1, 2], 3)[-1]
        session = make(eos_token_ids=[end])
        assert by_prompt(session.generate([1, 2]))[0][2] == "stop"
        assert len(by_prompt(session.generate([1, 2], ignore_eos=True, max_new_tokens=7))[0][0]) == 7

    def test_the_defaults_of_the_session(self):
        session = make(defaults=SamplingParams(max_new_tokens=4))
        assert len(list(session.generate([1, 2]))) == 4
        assert len(list(session.generate([1, 2], max_new_tokens=2))) == 2

    def test_a_sequence_that_is_full_ends_and_the_others_go_on(self):
        session = make(limit=7)
        prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
        found = by_prompt(session.generate(prompts, [SamplingParams(max_new_tokens=count) for count in (9, 6, 1)]))
        assert found == [
            (continuation(prompts[0], 3), "", "length"),
            (continuation(prompts[1], 6), "", "length"),
            (continuation(prompts[2], 1), "", "length"),
        ]
        assert session.tokens(0) + session.pending_tokens(0) == (*prompts[0], *continuation(prompts[0], 3))
        assert session.tokens(2) + session.pending_tokens(2) == (*prompts[2], *continuation(prompts[2], 1))

    def test_a_prompt_that_fills_the_slot_gets_one_token(self, session):
        row = list(range(S))
        assert by_prompt(session.generate([row])) == [(continuation(row, 1), "", "length")]
        assert (session.tokens(0), session.pending_tokens(0)) == (tuple(row), tuple(continuation(row, 1)))

    def test_the_next_turn(self, session):
        first = by_prompt(session.generate([[1, 2], [3]], max_new_tokens=2))
        second = by_prompt(session.generate([[4], [5, 6]], max_new_tokens=2, append=True))
        for (before, _, _), (after, _, _), prompt, turn in zip(first, second, [[1, 2], [3]], [[4], [5, 6]], strict=True):
            assert after == continuation([*prompt, *before, *turn], 2)

    def test_a_prompt_that_is_in_the_cache_already(self, session):
        session.prefill([[1, 2, 3]])
        assert by_prompt(session.generate([1, 2, 3, 4], reuse=True, max_new_tokens=2))[0][0] == continuation([1, 2, 3, 4], 2)
        assert session.statistics.reused_tokens == 3

    def test_it_can_be_left_at_any_token(self, session):
        for count in range(1, 7):
            seen: list[list[int]] = [[], []]
            events = session.generate([[1, 2], [3]], max_new_tokens=3)
            for _ in range(count):
                event = next(events)
                seen[event.index].append(event.token)
            events.close()
            for slot, prompt in enumerate([[1, 2], [3]]):
                assert session.tokens(slot) + session.pending_tokens(slot) == (*prompt, *seen[slot])

    @pytest.mark.parametrize(
        "meanwhile",
        [
            lambda session: session.prefill([[1], [2]]),
            lambda session: session.decode([1, 2]),
            lambda session: session.append([[1], []]),
            lambda session: session.rewind(0, 1),
            lambda session: next(session.generate([[1], [2]])),
        ],
        ids=["prefill", "decode", "append", "rewind", "generate"],
    )
    @pytest.mark.parametrize("read", [1, 2])
    def test_it_is_over_once_another_call_has_changed_the_sequences(self, session, meanwhile, read):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        for _ in range(read):
            next(events)
        meanwhile(session)
        text = refuse(session, ClosedError, lambda: next(events))
        assert text == "this iterator is over: another call has changed the sequences since. Call generate again."

    def test_it_is_over_once_the_session_is_closed(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        session.close()
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            next(events)

    def test_a_session_may_be_closed_at_the_last_token(self, session):
        for event in session.generate([1, 2], max_new_tokens=2):
            if event.finish_reason:
                session.close()

    def test_logits_that_are_not_finite(self, session):
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        next(events)
        table, session.engine._run = session.engine._run, lambda: (table(), _break_logits(session))
        with pytest.raises(
            EngineError, match=r"^logits: expected finite numbers, got nan for token 0\. The engine or its cache is damaged\.$"
        ):
            next(events)


def _break_logits(session):
    session.cache.memory.array(session._steps._buffers.logits)[...] = np.nan


class TestSeeds:
    PARAMS = SamplingParams(temperature=3.0, top_k=50, top_p=0.95, seed=5, max_new_tokens=8)

    def alone(self, prompt):
        return by_prompt(make(slots=1).generate(prompt, self.PARAMS))[0][0]

    def test_a_request_does_not_depend_on_its_neighbours_or_its_slot(self, session):
        prompts = [[1, 2, 3], [4], [5, 6]]
        others = [SamplingParams(temperature=9.0, seed=seed, max_new_tokens=seed) for seed in (3, 6)]
        for place in range(3):
            params = others[:]
            params.insert(place, self.PARAMS)
            assert by_prompt(session.generate(prompts, params))[place][0] == self.alone(prompts[place])

    def test_one_seed_for_all_prompts(self, session):
        found = by_prompt(session.generate([[1, 2], [1, 2]], self.PARAMS))
        assert found[0] == found[1]

    def test_without_a_seed_each_draws_its_own(self, session):
        found = by_prompt(session.generate([[1, 2]] * 3, temperature=9.0, max_new_tokens=8))
        assert len({tuple(tokens) for tokens, _, _ in found}) == 3

    def test_chunks_and_turns_do_not_matter(self, session):
        whole = self.alone([1, 2, 3, 4, 5, 6])
        session.prefill([[1, 2, 3]])
        assert by_prompt(session.generate([[4, 5, 6]], self.PARAMS, append=True))[0][0] == whole


class TestText:
    @pytest.fixture
    def session(self, tokenizer):
        (end,) = tokenizer.encode(EOS, add_special_tokens=False)
        with make(slots=2, limit=32, tokenizer=tokenizer, eos_token_ids=[end]) as session:
            yield session

    def test_prompts_are_encoded_as_the_model_wants_them(self, session, tokenizer):
        ids = tokenizer.encode("see")
        assert tokenizer.decode(ids[:1], skip_special_tokens=False) == BOS
        np.testing.assert_array_equal(session.prefill(["see", [1]]), [logits_after(ids), logits_after([1])])
        assert by_prompt(session.generate("see", max_new_tokens=3))[0][0] == continuation(ids, 3)
        assert by_prompt(session.generate(["see"], max_new_tokens=3))[0][0] == continuation(ids, 3)

    def test_a_next_turn_does_not_begin_the_text_again(self, session, tokenizer):
        ids = tokenizer.encode("see")
        more = tokenizer.encode(" the", add_special_tokens=False)
        session.prefill(["see"])
        np.testing.assert_array_equal(session.append([" the"]), [logits_after([*ids, *more])])
        session.prefill(["see"])
        assert by_prompt(session.generate(" the", append=True, max_new_tokens=2))[0][0] == continuation([*ids, *more], 2)

    def test_the_text_is_that_of_the_tokens(self, session, tokenizer):
        for tokens, text, _ in by_prompt(session.generate(["see", "the"], max_new_tokens=20, temperature=20.0, seed=3)):
            assert text == tokenizer.decode(tokens)

    def test_no_piece_holds_part_of_a_character(self, session, tokenizer):
        events = list(session.generate("the", max_new_tokens=20, temperature=20.0, seed=3))
        ids = tokenizer.encode("the")
        told = ""
        for place, event in enumerate(events):
            told += event.text
            whole = tokenizer.decode([*ids, *(one.token for one in events[: place + 1])])
            assert whole.startswith("the" + told)

    def test_a_stop_text_ends_one_and_the_other_goes_on(self, session):
        plain = by_prompt(session.generate(["see", "the"], max_new_tokens=12))
        stop = plain[0][1][3:6]
        found = by_prompt(session.generate(["see", "the"], max_new_tokens=12, stop=[stop]))
        assert found[0][1:] == (plain[0][1][: plain[0][1].index(stop)], "stop")
        if stop not in plain[1][1]:
            assert found[1] == plain[1]
        assert session.tokens(0) + session.pending_tokens(0) == (*session.tokenizer.encode("see"), *found[0][0])


class TestStatistics:
    def test_they_count(self, session):
        assert session.statistics == type(session.statistics)(
            prefill_seconds=0.0,
            prefill_tokens=0,
            reused_tokens=0,
            decode_seconds=0.0,
            decode_steps=0,
            decode_tokens=0,
            cache_bytes_live=0,
            cache_bytes_reserved=session.cache.nbytes,
        )
        assert session.statistics.prefill_tokens_per_second == session.statistics.decode_tokens_per_second == 0
        session.prefill([[1, 2, 3, 4, 5, 6], [7]])
        session.decode([1, 2])
        session.decode([1, 2])
        now = session.statistics
        assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 2, 4)
        # K and V of 1 + 2 heads of 16 float32, for 8 + 3 tokens.
        assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (8 + 3)
        assert 0 < now.prefill_seconds < 60
        assert 0 < now.decode_seconds < 60
        assert now.prefill_tokens_per_second == 7 / now.prefill_seconds
        assert now.decode_tokens_per_second == 4 / now.decode_seconds

    def test_slots_that_ride_along_are_not_counted(self, session):
        list(session.generate([[1, 2], [3]], [SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=4)]))
        assert (session.statistics.decode_steps, session.statistics.decode_tokens) == (3, 3)

    def test_reused_and_appended_tokens(self, session):
        session.prefill([[1, 2, 3]])
        session.append([[4, 5]])
        session.prefill([[1, 2, 3, 4, 9]], reuse=True)
        assert (session.statistics.prefill_tokens, session.statistics.reused_tokens) == (3 + 2 + 1, 4)


TOO_LONG = list(range(S + 1))

REFUSALS = [
    (ShapeError, lambda s: s.prefill([]), "prompts: expected 1 to max_batch_size=3 of them, got 0."),
    (ShapeError, lambda s: s.prefill([[1]] * 4), "prompts: expected 1 to max_batch_size=3 of them, got 4."),
    (ShapeError, lambda s: s.prefill([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ShapeError, lambda s: s.prefill("text"), "prompts: expected a sequence of prompts, got str."),
    (ShapeError, lambda s: s.prefill(3), "prompts: expected a sequence of prompts, got int."),
    (ShapeError, lambda s: s.prefill([1, 2]), "prompts[0]: expected a sequence of token ids, got int."),
    (ConfigError, lambda s: s.prefill(["text"]), "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
    (RangeError, lambda s: s.prefill([[1], [2, VOCAB]]), f"prompts[1][1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
    (RangeError, lambda s: s.prefill([[-1]]), f"prompts[0][0]: expected an integer from 0 to {VOCAB - 1}, got -1."),
    (RangeError, lambda s: s.prefill([[1.0]]), "prompts[0][0]: expected an integer, got 1.0."),
    (RangeError, lambda s: s.prefill([[True]]), "prompts[0][0]: expected an integer, got True."),
    (RangeError, lambda s: s.prefill([np.array([1.0])]), "prompts[0][0]: expected an integer, got np.float64(1.0)."),
    (
        CapacityError,
        lambda s: s.prefill([[1], TOO_LONG]),
        "prompt 1 has 17 tokens; that exceeds max_sequence_length=16. Nothing was changed.",
    ),
    (
        CapacityError,
        lambda s: s.append([[1], [1] * 15]),
        "slot 1 holds 2 tokens; adding 15 exceeds max_sequence_length=16. Nothing was changed.",
    ),
    (ShapeError, lambda s: s.append([[1]]), "turns: expected one for each of 2 active slots, got 1."),
    (RangeError, lambda s: s.append([[1], [VOCAB]]), f"prompts[1][0]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
    (ShapeError, lambda s: s.decode([1]), "tokens: expected one for each of 2 active slots, got 1."),
    (ShapeError, lambda s: s.decode("ab"), "tokens: expected a sequence of token ids, got str."),
    (RangeError, lambda s: s.decode([1, VOCAB]), f"tokens[1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
    (SlotError, lambda s: s.tokens(2), "slot 2: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    (SlotError, lambda s: s.pending_tokens(-1), "slot -1: expected 0 <= slot < 2 (active slots). Slots never wrap."),
    (ShapeError, lambda s: s.generate([]), "prompts: expected 1 to max_batch_size=3 of them, got 0."),
    (ShapeError, lambda s: s.generate([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ShapeError, lambda s: s.generate([[1], []], append=True), "prompts[1]: expected at least one token, got none."),
    (ShapeError, lambda s: s.generate([[1]], append=True), "prompts: expected one for each of 2 active slots, got 1."),
    (ShapeError, lambda s: s.generate([[1]], reuse=True), "prompts: expected one for each of 2 active slots, got 1."),
    (CapacityError, lambda s: s.generate([TOO_LONG]), "prompt 0 has 17 tokens; that exceeds max_sequence_length=16. Nothing was changed."),
    (
        CapacityError,
        lambda s: s.generate([[1] * 13, [1]], append=True),
        "slot 0 holds 4 tokens; adding 13 exceeds max_sequence_length=16. Nothing was changed.",
    ),
    (ConfigError, lambda s: s.generate("text"), "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
    (
        ConfigError,
        lambda s: s.generate([1], stop=["x"]),
        "stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids.",
    ),
    (RangeError, lambda s: s.generate([1], temperature=-1), "SamplingParams.temperature: expected a finite number, at least 0, got -1."),
    (
        RangeError,
        lambda s: s.generate([1], temprature=1),
        "generate: unknown option temprature. "
        "Expected ignore_eos, max_new_tokens, min_p, seed, stop, stop_token_ids, temperature, top_k, top_p.",
    ),
    (
        RangeError,
        lambda s: s.generate([1], SamplingParams(), seed=1, top_k=2),
        "generate: expected params or options, got both (seed, top_k).",
    ),
    (ShapeError, lambda s: s.generate([[1], [2]], [SamplingParams()]), "params: expected SamplingParams, or 2 of them, one per prompt."),
    (ShapeError, lambda s: s.generate([[1]], [None]), "params: expected SamplingParams, or 1 of them, one per prompt."),
    (ShapeError, lambda s: s.generate([[1]], 0.5), "params: expected SamplingParams, or 1 of them, one per prompt."),
    (
        RangeError,
        lambda s: s.generate([[1]], append=True, reuse=True),
        "generate: expected append or reuse, got both. A next turn keeps what its slot holds.",
    ),
]


class TestRefusals:
    @pytest.mark.parametrize(("kind", "call", "text"), REFUSALS, ids=range(len(REFUSALS)))
    def test_its_text_and_nothing_changes(self, session, kind, call, text):
        session.prefill([[1, 2, 3, 4], [5, 6]])
        assert refuse(session, kind, lambda: call(session)) == text

    def test_decode_with_a_full_slot(self, session):
        session.prefill([[5], list(range(S))])
        assert refuse(session, CapacityError, lambda: session.decode([1, 2])) == (
            "slot 1 holds 16 tokens; adding 1 exceeds max_sequence_length=16. Nothing was changed."
        )

    def test_nothing_is_active_yet(self, session):
        assert refuse(session, ShapeError, lambda: session.decode([])) == "tokens: there are no active slots. Call prefill first."
        assert refuse(session, ShapeError, lambda: session.append([[1]])) == "turns: expected one for each of 0 active slots, got 1."

    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.prefill([[1]]),
            lambda s: s.append([[1]]),
            lambda s: s.decode([1]),
            lambda s: s.rewind(0, 0),
            lambda s: s.generate([1]),
            lambda s: s.__enter__(),
        ],
        ids=["prefill", "append", "decode", "rewind", "generate", "with"],
    )
    def test_a_closed_session(self, session, call):
        session.prefill([[1, 2]])
        session.close()
        with pytest.raises(ClosedError) as error:
            call(session)
        assert str(error.value) == "this InferenceSession is closed."
        assert len(session.engine.steps) == 1


# --- random programs beside lists of tokens ---


class Oracle:
    """What the slots should hold."""

    def __init__(self) -> None:
        self.cached: list[list[int]] = []
        self.pending: list[list[int]] = []

    def check(self, session: InferenceSession) -> None:
        assert session.cache.active_batch_size == len(self.cached)
        assert [list(session.tokens(slot)) for slot in range(len(self.cached))] == self.cached
        assert [list(session.pending_tokens(slot)) for slot in range(len(self.cached))] == self.pending
        assert session.cache.host_kv_cache_lengths == tuple(map(len, self.cached))
        assert session.cache.kv_cache_lengths.numpy().tolist() == list(map(len, self.cached))


TOKENS = st.integers(0, 30)


@given(data=st.data())
@pytest.mark.parametrize(("slots", "limit"), [(3, 16), (4, 7), (9, 7)], ids=["aligned", "not aligned", "every eighth"])
def test_random_programs(slots, limit, data):
    session, oracle = make(slots=slots, limit=limit), Oracle()
    rows = st.lists(st.lists(TOKENS, min_size=1, max_size=limit), min_size=1, max_size=slots)
    for _ in range(data.draw(st.integers(1, 8))):
        poison(session.cache)
        _OPERATIONS[data.draw(st.sampled_from(sorted(_OPERATIONS)))](session, oracle, data, rows, limit)
        oracle.check(session)
    session.close()
    assert session.cache.memory.live_nbytes == 0


def _prefill(session, oracle, data, rows, limit):
    prompts = data.draw(rows)
    reuse = len(prompts) == len(oracle.cached) and data.draw(st.booleans())
    if reuse:  # begin some as the slots do
        prompts = [(held + row)[:limit] if data.draw(st.booleans()) else row for held, row in zip(oracle.cached, prompts, strict=True)]
    np.testing.assert_array_equal(session.prefill(prompts, reuse=reuse), [logits_after(row) for row in prompts])
    oracle.cached, oracle.pending = [list(row) for row in prompts], [[] for _ in prompts]


def _append(session, oracle, data, rows, limit):
    turns = [data.draw(st.lists(TOKENS, max_size=4)) for _ in oracle.cached]
    wanted = [pending + turn if turn else [] for pending, turn in zip(oracle.pending, turns, strict=True)]
    try:
        logits = session.append(turns)
    except CapacityError:
        assert any(len(held) + len(row) > limit for held, row in zip(oracle.cached, wanted, strict=True))
        return
    except LayoutError:
        assert limit == 7
        assert any(len(held) == limit for held in oracle.cached)
        return
    for slot, row in enumerate(wanted):
        oracle.cached[slot] += row
        oracle.pending[slot] = [] if row else oracle.pending[slot]
        expected = logits_after(oracle.cached[slot]) if row else np.full(VOCAB, np.nan, np.float32)
        np.testing.assert_array_equal(logits[slot], expected)


def _decode(session, oracle, data, rows, limit):
    tokens = [data.draw(TOKENS) for _ in oracle.cached]
    try:
        logits = session.decode(tokens)
    except CapacityError:
        assert any(len(held) == limit for held in oracle.cached)
        return
    except ShapeError:
        assert not tokens
        return
    for held, token in zip(oracle.cached, tokens, strict=True):
        held.append(token)
    oracle.pending = [[] for _ in tokens]
    np.testing.assert_array_equal(logits, [logits_after(held) for held in oracle.cached])


def _rewind(session, oracle, data, rows, limit):
    if oracle.cached:
        slot = data.draw(st.integers(0, len(oracle.cached) - 1))
        length = data.draw(st.integers(0, len(oracle.cached[slot])))
        session.rewind(slot, length)
        del oracle.cached[slot][length:]
        oracle.pending[slot] = []


def _generate(session, oracle, data, rows, limit):
    append = bool(oracle.cached) and data.draw(st.booleans())
    prompts = [data.draw(st.lists(TOKENS, min_size=1, max_size=3)) for _ in oracle.cached] if append else data.draw(rows)
    params = [SamplingParams(max_new_tokens=data.draw(st.integers(1, 5))) for _ in prompts]
    before = [c + p for c, p in zip(oracle.cached, oracle.pending, strict=True)] if append else [[] for _ in prompts]
    try:
        events = session.generate(prompts, params, append=append)
        seen = [next(events)]
    except CapacityError:
        assert any(len(held) + len(row) > limit for held, row in zip(before, prompts, strict=True))
        return
    except LayoutError:
        assert limit == 7
        assert append
        return
    seen += itertools.islice(events, data.draw(st.integers(0, 12)))
    events.close()
    found = by_prompt(seen)
    for slot, (held, prompt) in enumerate(zip(before, prompts, strict=True)):
        whole = [*held, *prompt]
        tokens, _, reason = found[slot] if slot < len(found) else ([], "", None)
        assert tokens == continuation(whole, len(tokens))
        room = limit - len(whole) + 1
        assert reason == ("length" if tokens and len(tokens) == min(room, params[slot].max_new_tokens) else None)
        assert [*session.tokens(slot), *session.pending_tokens(slot)] == [*whole, *tokens]
        assert len(session.pending_tokens(slot)) <= 2
    slots = range(len(prompts))
    oracle.cached = [list(session.tokens(slot)) for slot in slots]
    oracle.pending = [list(session.pending_tokens(slot)) for slot in slots]


_OPERATIONS = {"prefill": _prefill, "append": _append, "decode": _decode, "rewind": _rewind, "generate": _generate}


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.decode([4, 5]),
        lambda session: session.append([[4], [5]]),
        lambda session: session.rewind(0, 1),
        lambda session: session.prefill([[1, 2, 4], [3]], reuse=True),
        lambda session: session.generate([[4], [5]], append=True),
    ],
    ids=["decode", "append", "rewind", "reuse", "generate"],
)
def test_lengths_that_were_changed_behind_the_session_are_refused(session, call):
    session.prefill([[1, 2, 3], [3]])
    session.cache.rewind(0, 2, stream=session.cache.memory.create_stream())
    with pytest.raises(RangeError, match=r"^cache lengths: expected \(3, 1\), the tokens that this session has run, got \(2, 1\)"):
        call(session)
    assert (session.tokens(0), session.cache.host_kv_cache_lengths) == ((1, 2, 3), (2, 1))
    assert np.isfinite(session.prefill([[1, 2]])).all()


def test_decode_before_any_prefill_says_so(session):
    with pytest.raises(ShapeError, match=r"^tokens: there are no active slots\. Call prefill first\."):
        session.decode([1])


def test_statistics_stay_after_close_and_count_no_live_bytes(session):
    session.prefill([[1, 2, 3]])
    live = session.statistics.cache_bytes_live
    session.close()
    assert live > 0
    assert (session.statistics.prefill_tokens, session.statistics.cache_bytes_live) == (3, 0)
