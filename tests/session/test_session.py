"""``InferenceSession`` against lists of tokens: what it holds, what it answers, what it refuses.

The engine is the exact one of ``tests.helpers.recording``: its logits are a function of all tokens that it finds in a slot.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.helpers.recording import (
    VOCAB,
    Journal,
    RecordingCache,
    RecordingEngine,
    RecordingMemory,
    kv_config,
    logits_after,
    poison,
)
from tests.helpers.sessions import MAX_SEQUENCE_LENGTH, continuation, make, refuse
from trt_kvcache import CacheConfig, InferenceSession, KVLayout, LinearKVCache, SamplingParams, TensorNames
from trt_kvcache.engine.protocol import EngineProfile
from trt_kvcache.errors import (
    BindingError,
    CapacityError,
    ClosedError,
    ConfigError,
    LayoutError,
    RangeError,
    ShapeError,
    SlotError,
)

S = MAX_SEQUENCE_LENGTH


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

    def test_logits_are_copies_that_the_caller_owns(self, session):
        first = session.prefill([[1], [2]])
        second = session.decode([3, 4])
        copies = first.copy(), second.copy()
        session.decode([5, 6])
        session.prefill([[7], [8]])
        np.testing.assert_array_equal(first, copies[0])
        np.testing.assert_array_equal(second, copies[1])

    def test_a_prefill_starts_new_sequences(self, session):
        session.prefill([[1, 2], [3], [4]])
        session.prefill([[5]])
        assert (session.tokens(0), session.cache.active_batch_size) == ((5,), 1)

    @pytest.mark.parametrize("kind", [tuple, np.array, lambda row: np.array(row, np.int64)])
    def test_prompts_may_be_any_kind_of_sequence(self, session, kind):
        np.testing.assert_array_equal(session.prefill([kind([1, 2]), kind([3])]), [logits_after([1, 2]), logits_after([3])])
        np.testing.assert_array_equal(session.decode(kind([4, 5])), [logits_after([1, 2, 4]), logits_after([3, 5])])
        assert session.tokens(0) == (1, 2, 4)
        assert all(type(token) is int for token in session.tokens(0))

    def test_prompts_may_be_one_array(self, session):
        np.testing.assert_array_equal(session.prefill(np.array([[1, 2], [3, 4]])), [logits_after([1, 2]), logits_after([3, 4])])

    def test_a_prompt_may_fill_its_slot(self, session):
        row = list(range(S))
        np.testing.assert_array_equal(session.prefill([row, [1]]), [logits_after(row), logits_after([1])])

    def test_properties(self, session):
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
    def test_dtypes_of_token_ids_and_logits(self, options, tolerance):
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

    def test_an_engine_with_other_tensor_names(self):
        memory, kv = RecordingMemory(Journal()), kv_config()
        names = TensorNames(input_ids="tokens", k_cache="past_key_{i}", present_v_cache="value_{i}_out")
        self.check(InferenceSession(RecordingEngine(kv, memory, names=names), RecordingCache(kv, memory=memory), names=names))

    def test_an_engine_with_one_profile(self):
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

    def test_a_combined_cache_of_one_slot(self):
        memory, kv = RecordingMemory(Journal()), kv_config(slots=1, layout=KVLayout.COMBINED)
        session = InferenceSession(RecordingEngine(kv, memory), RecordingCache(kv, memory=memory))
        np.testing.assert_array_equal(session.prefill([[1, 2, 3, 4, 5]]), [logits_after([1, 2, 3, 4, 5])])

    def test_an_engine_and_a_cache_that_do_not_fit_stay_open(self):
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

    def test_without_a_common_prefix_everything_is_run(self, session):
        session.prefill([[1, 2]])
        np.testing.assert_array_equal(session.prefill([[2, 1]], reuse=True), [logits_after([2, 1])])
        assert session.statistics.reused_tokens == 0

    def test_reuse_needs_one_prompt_per_active_slot(self, session):
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
    def test_append_adds_tokens_to_each_slot(self, session):
        session.prefill([[1, 2], [3]])
        np.testing.assert_array_equal(session.append([[4, 5, 6], [7]]), [logits_after([1, 2, 4, 5, 6]), logits_after([3, 7])])

    def test_logits_of_a_slot_that_gets_no_tokens_are_nan(self, session):
        session.prefill([[1, 2], [3], [4]])
        logits = session.append([[], [5] * 6, []])
        assert np.isnan(logits[[0, 2]]).all()
        np.testing.assert_array_equal(logits[1], logits_after([3, *[5] * 6]))
        np.testing.assert_array_equal(session.decode([1, 1, 1])[2], logits_after([4, 1]))

    def test_append_of_no_tokens_gives_nan(self, session):
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

    def test_decode_replaces_pending_tokens(self, session):
        list(session.generate([[1, 2]], max_new_tokens=1))
        np.testing.assert_array_equal(session.decode([9]), [logits_after([1, 2, 9])])
        assert session.pending_tokens(0) == ()

    def test_a_full_slot_before_one_that_gets_tokens(self, session):
        session.prefill([list(range(S)), [1]])
        np.testing.assert_array_equal(session.append([[], [2, 3]])[1], logits_after([1, 2, 3]))

    def test_a_full_slot_before_one_that_no_view_can_start_at_is_refused(self):
        session = make(limit=7)
        session.prefill([list(range(7)), [1]])
        assert refuse(session, LayoutError, lambda: session.append([[], [2, 3]])).startswith("slot 1: slot 0 before it is full, ")


class TestRewind:
    def test_append_continues_from_the_length_that_was_rewound_to(self, session):
        session.prefill([[1, 2, 3, 4], [5, 6]])
        session.rewind(0, 2)
        assert (session.tokens(0), session.tokens(1)) == ((1, 2), (5, 6))
        assert session.cache.host_kv_cache_lengths == (2, 2)
        poison(session.cache)
        np.testing.assert_array_equal(session.append([[7], []])[0], logits_after([1, 2, 7]))

    def test_rewind_drops_pending_tokens(self, session):
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
    def test_slots_and_lengths_out_of_range_are_refused(self, session, slot, length, kind, text):
        session.prefill([[1, 2, 3], [4]])
        assert refuse(session, kind, lambda: session.rewind(slot, length)) == text


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
    (ShapeError, lambda s: s.generate([]), "prompts: expected at least one, got none."),
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
        "generate: unknown option temprature. Did you mean temperature instead of temprature? "
        "Expected counter, frequency_penalty, ignore_eos, logit_bias, logits_processors, logprobs, max_new_tokens, min_p, "
        "presence_penalty, repetition_penalty, seed, stop, stop_token_ids, temperature, top_k, top_p.",
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
    def test_a_refused_call_says_why_and_changes_nothing(self, session, kind, call, text):
        session.prefill([[1, 2, 3, 4], [5, 6]])
        assert refuse(session, kind, lambda: call(session)) == text

    def test_decode_with_a_full_slot_is_refused(self, session):
        session.prefill([[5], list(range(S))])
        assert refuse(session, CapacityError, lambda: session.decode([1, 2])) == (
            "slot 1 holds 16 tokens; adding 1 exceeds max_sequence_length=16. Nothing was changed."
        )

    def test_calls_without_active_slots_are_refused(self, session):
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
    def test_every_call_on_a_closed_session_is_refused(self, session, call):
        session.prefill([[1, 2]])
        session.close()
        with pytest.raises(ClosedError) as error:
            call(session)
        assert str(error.value) == "this InferenceSession is closed."
        assert len(session.engine.steps) == 1


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
    with raises(RangeError, "cache lengths", expected="(3, 1)", got="(2, 1)"):
        call(session)
    assert (session.tokens(0), session.cache.host_kv_cache_lengths) == ((1, 2, 3), (2, 1))
    assert np.isfinite(session.prefill([[1, 2]])).all()


def test_decode_before_any_prefill_says_so(session):
    with pytest.raises(ShapeError, match=r"^tokens: there are no active slots\. Call prefill first\."):
        session.decode([1])


class TestPlot:
    def test_the_picture_shows_the_active_slots(self, session):
        session.prefill([[1, 2, 3], [4]])
        svg = session.plot().svg
        assert "slot 0" in svg
        assert "not active" in svg

    def test_the_picture_can_be_written_to_a_file(self, session, tmp_path):
        session.prefill([[1, 2, 3]])
        assert session.plot(tmp_path / "cache.svg").svg == (tmp_path / "cache.svg").read_text(encoding="utf-8")

    def test_a_closed_session_cannot_be_drawn(self, session):
        session.close()
        with pytest.raises(ClosedError, match="this InferenceSession is closed"):
            session.plot()
