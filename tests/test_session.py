"""``InferenceSession`` against lists of tokens: what it holds, what it answers, what it refuses.

The engine is the exact one of ``fakes``: its logits are a function of all tokens that it finds in a slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from checkpoint.tokenizer_folders import BOS, EOS, byte_level_folder
from fakes import VOCAB, Journal, RecordingEngine, RecordingMemory, cache_rows, kv_config, logits_after, poison, recorded
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
    return InferenceSession(*recorded(kv_config(slots=slots, limit=limit)), **options)


@pytest.fixture
def session():
    with make() as session:
        yield session


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def same(logits: Any, *rows: Sequence[int]) -> None:
    """Check that logits are those after these rows, each alone."""
    np.testing.assert_array_equal(logits, [logits_after(row) for row in rows])


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def at_most(*counts: int) -> list[SamplingParams]:
    return [SamplingParams(max_new_tokens=count) for count in counts]


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


def held(session, slot):
    """What a slot has been given and has been told: cached, then pending."""
    return [*session.tokens(slot), *session.pending_tokens(slot)]


def refuse(session, kind: type[KVCacheError], call) -> str:
    """Call what must fail; nothing is enqueued and nothing changes; return the text."""

    def observe():
        slots = range(session.cache.active_batch_size)
        lengths = session.cache.host_kv_cache_lengths, session.cache.kv_cache_lengths.numpy().tolist()
        tokens = [(session.tokens(slot), session.pending_tokens(slot)) for slot in slots]
        return lengths, tokens, cache_rows(session.cache), session.statistics, len(session.engine.steps)

    before = observe()
    with pytest.raises(kind) as error:
        call()
    assert observe() == before
    return str(error.value)


# --- prefill, decode, append ---


def test_logits_are_float32_those_of_each_row_alone_and_the_callers(session):
    first, second = session.prefill([[1, 2, 3, 4, 5, 6], [7], [8, 9]]), session.decode([10, 11, 12])
    session.decode([5, 6, 7])
    session.prefill([[7], [8]])
    assert (first.dtype, second.dtype) == (np.float32, np.float32)
    same(first, [1, 2, 3, 4, 5, 6], [7], [8, 9])
    same(second, [1, 2, 3, 4, 5, 6, 10], [7, 11], [8, 9, 12])
    assert (session.tokens(0), session.cache.active_batch_size) == ((7,), 2)
    assert (session.vocab_size, session.max_sequence_length, session.tokenizer, session.defaults) == (VOCAB, S, None, SamplingParams())


@pytest.mark.parametrize("kind", [tuple, np.array, lambda row: np.array(row, np.int64)])
def test_any_kind_of_sequence(session, kind):
    same(session.prefill([kind([1, 2]), kind([3])]), [1, 2], [3])
    same(session.decode(kind([4, 5])), [1, 2, 4], [3, 5])
    assert [(type(token), token) for token in session.tokens(0)] == [(int, 1), (int, 2), (int, 4)]
    same(session.prefill(np.array([[1, 2], [3, 4]])), [1, 2], [3, 4])


STEP_NAMES = {"input_ids": "tokens", "kvcache_start_index": "past", "last_token_ids": "which", "logits": "scores"}
CACHE_NAMES = {"k_cache": "k{i}", "v_cache": "v{i}", "present_k_cache": "k{i}_out", "present_v_cache": "v{i}_out"}


@pytest.mark.parametrize(
    ("cache", "engine", "tolerance"),
    [
        ({}, {"index_dtype": "int64"}, 0),
        ({}, {"logits_dtype": "float16"}, 2**-10),
        ({}, {"logits_dtype": "bfloat16"}, 2**-7),
        ({"dtype": "float16"}, {}, 0),
        ({"dtype": "bfloat16"}, {}, 0),
        ({}, {"names": TensorNames(**STEP_NAMES, **CACHE_NAMES)}, 0),
        ({}, {"profiles": [EngineProfile(name="any", min_batch=1, max_batch=3, min_width=1, max_width=4)]}, 0),
        ({"slots": 1, "layout": KVLayout.COMBINED}, {}, 0),
        (None, {}, 0),
    ],
    ids=["int64", "float16 logits", "bfloat16 logits", "float16", "bfloat16", "names", "one profile", "combined slot", "linear"],
)
def test_engines_and_caches(cache, engine, tolerance):
    if cache is None:
        sizes = {"num_attention_layers": 2, "max_batch_size": 3, "max_sequence_length": 7, "num_kv_heads": 2, "head_dim": 8}
        memory = RecordingMemory(Journal())
        linear = LinearKVCache(CacheConfig(**sizes, dtype="float32", layout=KVLayout.SEPARATE), memory=memory)
        parts: Any = RecordingEngine(linear.kv_config, memory), linear
    else:
        parts = recorded(kv_config(**cache), **engine)
    session = InferenceSession(*parts, names=engine.get("names", TensorNames()))
    rows = [[1, 2, 3, 4, 5, 6], [7]][: session.cache.kv_config.max_batch_size]
    for logits in (session.prefill(rows), session.decode([8, 9][: len(rows)])):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, [logits_after(row) for row in rows], rtol=tolerance)
        rows = [[*row, token] for row, token in zip(rows, (8, 9), strict=False)]


def test_a_batch_that_no_profile_takes_is_refused_before_anything_changes():
    fixed = EngineProfile(name="fixed", min_batch=3, max_batch=3, min_width=1, max_width=4)
    session = InferenceSession(*recorded(profiles=[fixed]))
    session.prefill([[1], [2], [3]])
    assert refuse(session, BindingError, lambda: session.prefill([[1, 2], [3]])) == (
        "no optimisation profile takes 2 slots of 2 new tokens. The engine has fixed: batch 3-3, width 1-4."
    )


@pytest.mark.parametrize(
    ("before", "prompts", "start"),
    [
        ([[1, 2, 3, 4, 7], [5, 6, 8]], [[1, 2, 3, 9, 9], [5, 6, 8, 1]], [3, 3]),
        ([[1, 2, 3, 4]], [[1, 2, 3]], [2]),
        ([[1, 2]], [[2, 1]], [0]),
    ],
    ids=["only what is new is run", "at least one token is run", "nothing in common"],
)
def test_reuse(session, before, prompts, start):
    session.prefill(before)
    same(session.prefill(prompts, reuse=True), *prompts)
    assert (session.engine.steps[-1].start, session.statistics.reused_tokens) == (start, sum(start))


def test_pending_tokens_are_not_reused_but_run(session):
    list(session.generate([[1, 2]], max_new_tokens=2))
    tokens = [1, 2, *continuation([1, 2], 2), 5]
    same(session.prefill([tokens], reuse=True), tokens)
    assert session.statistics.reused_tokens == 3


def test_pending_tokens_come_first_stay_where_nothing_comes_and_give_way_to_decode(session):
    list(session.generate([[1, 2], [3], [4]], at_most(3, 1, 1)))
    rows = [[1, 2, *continuation([1, 2], 3)], [3, *continuation([3], 1)], [4, *continuation([4], 1)]]
    assert [session.pending_tokens(slot) for slot in range(3)] == [(row[-1],) for row in rows]
    same(session.append([[8], [9, 9], []])[:2], [*rows[0], 8], [*rows[1], 9, 9])
    assert [session.pending_tokens(slot) for slot in range(3)] == [(), (), (rows[2][-1],)]
    same(session.decode([5, 6, 7])[2:], [4, 7])
    assert session.pending_tokens(2) == ()


def test_a_full_slot_stands_before_one_that_gets_a_turn(session):
    session.prefill([list(range(S)), [1]])
    same(session.append([[], [2, 3]])[1:], [1, 2, 3])
    unaligned = make(limit=7)
    unaligned.prefill([list(range(7)), [1]])
    assert refuse(unaligned, LayoutError, lambda: unaligned.append([[], [2, 3]])).startswith("slot 1: slot 0 before it is full, ")


# --- generate ---


def test_each_prompt_is_continued_and_tokens_come_as_they_are_made(session):
    prompts = [[1, 2, 3], [6]]
    events = session.generate(prompts, max_new_tokens=3)
    assert session.engine.steps == []
    seen = [next(events), next(events)]
    assert len(session.engine.steps) == 1
    seen.append(next(events))
    assert len(session.engine.steps) == 2
    seen += events
    assert [event.index for event in seen] == [0, 1, 0, 1, 0, 1]
    assert by_prompt(seen) == [(continuation(prompt, 3), "", "length") for prompt in prompts]


def test_parameters_of_each_and_of_all(session):
    stop = continuation([4], 2)[-1]
    found = by_prompt(session.generate([[1, 2], [3], [4]], [*at_most(2, 6), SamplingParams(stop_token_ids=[stop])]))
    assert found[:2] == [(continuation([1, 2], 2), "", "length"), (continuation([3], 6), "", "length")]
    assert found[2] == (continuation([4], continuation([4], 2).index(stop) + 1), "", "stop")
    assert [len(tokens) for tokens, _, _ in by_prompt(session.generate([[1], [2]], *at_most(2)))] == [2, 2]


def test_what_the_session_says_where_the_caller_does_not():
    end = continuation([1, 2], 3)[-1]
    session = make(eos_token_ids=[end], defaults=SamplingParams(max_new_tokens=7))
    assert by_prompt(session.generate([1, 2]))[0][2] == "stop"
    assert len(list(session.generate([1, 2], ignore_eos=True))) == 7
    assert len(list(session.generate([1, 2], max_new_tokens=2))) == 2


def test_a_prompt_that_fills_the_slot_gets_one_token(session):
    row = list(range(S))
    assert by_prompt(session.generate([row])) == [(continuation(row, 1), "", "length")]
    assert (session.tokens(0), session.pending_tokens(0)) == (tuple(row), tuple(continuation(row, 1)))


def test_one_prompt_by_itself_that_is_in_the_cache_already(session):
    session.prefill([[1, 2, 3]])
    for prompt in ([1, 2, 3, 4], np.array([1, 2, 3, 4])):
        assert by_prompt(session.generate(prompt, reuse=True, max_new_tokens=2))[0][0] == continuation([1, 2, 3, 4], 2)
    assert session.statistics.reused_tokens == 6


def test_it_is_over_once_the_session_is_closed_which_it_may_be_at_the_last_token(session):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    next(events)
    session.close()
    with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
        next(events)
    with make() as other:
        for event in other.generate([1, 2], max_new_tokens=2):
            if event.finish_reason:
                other.close()


def test_logits_that_are_not_finite(session):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    list(itertools.islice(events, 2))
    run = session.engine._run

    def break_logits():
        run()
        session.cache.memory.array(session._steps._buffers.logits)[...] = np.nan

    session.engine._run = break_logits
    with pytest.raises(EngineError, match=r"^logits: expected finite numbers, got nan for token 0\. The engine or its cache is damaged\.$"):
        next(events)


class TestSeeds:
    PARAMS = SamplingParams(temperature=3.0, top_k=50, top_p=0.95, seed=5, max_new_tokens=8)

    def alone(self, prompt):
        return by_prompt(make(slots=1).generate(prompt, self.PARAMS))[0][0]

    def test_a_request_does_not_depend_on_its_neighbours_or_its_slot(self, session):
        prompts = [[1, 2, 3], [4], [5, 6]]
        for place in range(3):
            params = [SamplingParams(temperature=9.0, seed=seed, max_new_tokens=seed) for seed in (3, 6)]
            params.insert(place, self.PARAMS)
            assert by_prompt(session.generate(prompts, params))[place][0] == self.alone(prompts[place])

    def test_one_seed_for_all_prompts_or_one_for_each(self, session):
        found = by_prompt(session.generate([[1, 2], [1, 2]], self.PARAMS))
        assert found[0] == found[1]
        found = by_prompt(session.generate([[1, 2]] * 3, temperature=9.0, max_new_tokens=8))
        assert len({tuple(tokens) for tokens, _, _ in found}) == 3


class TestText:
    @pytest.fixture
    def session(self, tokenizer):
        with make(slots=2, limit=32, tokenizer=tokenizer, eos_token_ids=tokenizer.encode(EOS, add_special_tokens=False)) as session:
            yield session

    def test_prompts_are_encoded_as_the_model_wants_them_and_turns_do_not_begin_the_text_again(self, session, tokenizer):
        ids, more = tokenizer.encode("see"), tokenizer.encode(" the", add_special_tokens=False)
        assert tokenizer.decode(ids[:1], skip_special_tokens=False) == BOS
        for prompts in ("see", ["see"]):
            assert by_prompt(session.generate(prompts, max_new_tokens=3))[0][0] == continuation(ids, 3)
        same(session.prefill(["see", [1]]), ids, [1])
        same(session.append([" the", []])[:1], [*ids, *more])
        session.prefill(["see"])
        assert by_prompt(session.generate(" the", append=True, max_new_tokens=2))[0][0] == continuation([*ids, *more], 2)

    def test_a_stop_text_ends_one_and_the_other_goes_on(self, session):
        plain = by_prompt(session.generate(["see", "the"], max_new_tokens=12))
        stop = plain[0][1][3:6]
        assert stop not in plain[1][1]
        found = by_prompt(session.generate(["see", "the"], max_new_tokens=12, stop=[stop]))
        assert found[0][1:] == (plain[0][1][: plain[0][1].index(stop)], "stop")
        assert found[1] == plain[1]
        assert held(session, 0) == [*session.tokenizer.encode("see"), *found[0][0]]


def test_statistics(session):
    names = ["prefill_seconds", "prefill_tokens", "reused_tokens", "decode_seconds", "decode_steps", "decode_tokens", "cache_bytes_live"]
    assert session.statistics == type(session.statistics)(**dict.fromkeys(names, 0), cache_bytes_reserved=session.cache.nbytes)
    assert session.statistics.prefill_tokens_per_second == session.statistics.decode_tokens_per_second == 0
    session.prefill([[1, 2, 3, 4, 5, 6], [7]])
    session.decode([1, 2])
    session.decode([1, 2])
    now = session.statistics
    assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 2, 4)
    assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (8 + 3)  # K and V of 1 + 2 heads of 16 float32, for 8 + 3 tokens
    assert 0 < now.prefill_seconds < 60
    assert 0 < now.decode_seconds < 60
    assert (now.prefill_tokens_per_second, now.decode_tokens_per_second) == (7 / now.prefill_seconds, 4 / now.decode_seconds)
    session.append([[4, 5], []])
    session.prefill([[1, 2, 3, 4, 5, 6, 1, 1, 4, 9], [7, 9]], reuse=True)
    assert (session.statistics.prefill_tokens, session.statistics.reused_tokens) == (7 + 2 + 2, 9 + 1)
    list(session.generate([[1, 2], [3]], at_most(1, 4)))  # one rides along, uncounted
    session.close()
    now = session.statistics
    assert (now.decode_steps, now.decode_tokens, now.cache_bytes_live) == (2 + 3, 4 + 3, 0)


# --- refusals ---

TOO_LONG = list(range(S + 1))
IDS = f"expected an integer from 0 to {VOCAB - 1}"
SLOT = "expected 0 <= slot < 2 (active slots). Slots never wrap."
ONE_EACH = "expected one for each of 2 active slots, got 1."
NO_TEXT = "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."
TOO_MANY = "exceeds max_sequence_length=16. Nothing was changed."
OPTIONS = ", ".join(sorted(field.name for field in fields(SamplingParams)))

#: The call on a session with two sequences of 4 and 2 tokens, and what it says.
REFUSALS = [
    (ShapeError, lambda s: s.prefill([]), "prompts: expected 1 to max_batch_size=3 of them, got 0."),
    (ShapeError, lambda s: s.prefill([[1]] * 4), "prompts: expected 1 to max_batch_size=3 of them, got 4."),
    (ShapeError, lambda s: s.prefill([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ShapeError, lambda s: s.prefill("text"), "prompts: expected a sequence of prompts, got str."),
    (ShapeError, lambda s: s.prefill([1, 2]), "prompts[0]: expected a sequence of token ids, got int."),
    (ShapeError, lambda s: s.prefill([[1]], reuse=True), f"prompts: {ONE_EACH}"),
    (ConfigError, lambda s: s.prefill(["text"]), NO_TEXT),
    (RangeError, lambda s: s.prefill([[1], [2, VOCAB]]), f"prompts[1][1]: {IDS}, got {VOCAB}."),
    (RangeError, lambda s: s.prefill([[-1]]), f"prompts[0][0]: {IDS}, got -1."),
    (RangeError, lambda s: s.prefill([[1.0]]), "prompts[0][0]: expected an integer, got 1.0."),
    (RangeError, lambda s: s.prefill([[True]]), "prompts[0][0]: expected an integer, got True."),
    (CapacityError, lambda s: s.prefill([[1], TOO_LONG]), f"prompt 1 has 17 tokens; that {TOO_MANY}"),
    (CapacityError, lambda s: s.append([[1], [1] * 15]), f"slot 1 holds 2 tokens; adding 15 {TOO_MANY}"),
    (ShapeError, lambda s: s.append([[1]]), f"turns: {ONE_EACH}"),
    (ShapeError, lambda s: s.decode([1]), f"tokens: {ONE_EACH}"),
    (ShapeError, lambda s: s.decode("ab"), "tokens: expected a sequence of token ids, got str."),
    (RangeError, lambda s: s.decode([1, VOCAB]), f"tokens[1]: {IDS}, got {VOCAB}."),
    (SlotError, lambda s: s.tokens(2), f"slot 2: {SLOT}"),
    (RangeError, lambda s: s.rewind(0, 5), "rewind: slot 0 holds 4 tokens; expected 0 to 4, got 5."),
    (ShapeError, lambda s: s.generate([[1], []], append=True), "prompts[1]: expected at least one token, got none."),
    (ShapeError, lambda s: s.generate([[1]], append=True), f"prompts: {ONE_EACH}"),
    (ShapeError, lambda s: s.generate([[1]], reuse=True), f"prompts: {ONE_EACH}"),
    (CapacityError, lambda s: s.generate([TOO_LONG]), f"prompt 0 has 17 tokens; that {TOO_MANY}"),
    (CapacityError, lambda s: s.generate([[1] * 13, [1]], append=True), f"slot 0 holds 4 tokens; adding 13 {TOO_MANY}"),
    (
        ConfigError,
        lambda s: s.generate([1], stop=["x"]),
        "stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids.",
    ),
    (RangeError, lambda s: s.generate([1], temperature=-1), "SamplingParams.temperature: expected a finite number, at least 0, got -1."),
    (RangeError, lambda s: s.generate([1], temprature=1), f"generate: unknown option temprature. Expected {OPTIONS}."),
    (
        RangeError,
        lambda s: s.generate([1], SamplingParams(), seed=1, top_k=2),
        "generate: expected params or options, got both (seed, top_k).",
    ),
    (ShapeError, lambda s: s.generate([[1], [2]], at_most(1)), "params: expected SamplingParams, or 2 of them, one per prompt."),
    (ShapeError, lambda s: s.generate([[1]], 0.5), "params: expected SamplingParams, or 1 of them, one per prompt."),
    (
        RangeError,
        lambda s: s.generate([[1]], append=True, reuse=True),
        "generate: expected append or reuse, got both. A next turn keeps what its slot holds.",
    ),
]


@pytest.mark.parametrize(("kind", "call", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(session, kind, call, text):
    session.prefill([[1, 2, 3, 4], [5, 6]])
    assert refuse(session, kind, lambda: call(session)) == text


def test_refusals_of_a_full_slot_and_before_any_prefill(session):
    assert refuse(session, ShapeError, lambda: session.decode([])) == "tokens: there are no active slots. Call prefill first."
    assert refuse(session, ShapeError, lambda: session.append([[1]])) == "turns: expected one for each of 0 active slots, got 1."
    session.prefill([[5], list(range(S))])
    assert refuse(session, CapacityError, lambda: session.decode([1, 2])) == f"slot 1 holds 16 tokens; adding 1 {TOO_MANY}"


CALLS = {
    "decode": lambda s: s.decode([4, 5]),
    "append": lambda s: s.append([[4], [5]]),
    "rewind": lambda s: s.rewind(0, 1),
    "reuse": lambda s: s.prefill([[1, 2, 4], [3]], reuse=True),
    "generate": lambda s: s.generate([[4], [5]], append=True),
    "prefill": lambda s: s.prefill([[1], [2]]),
    "new": lambda s: next(s.generate([[1], [2]])),
    "with": lambda s: s.__enter__(),
}


def some_calls(*names):
    return pytest.mark.parametrize("call", [CALLS[name] for name in names], ids=names)


@some_calls(*CALLS)
def test_a_closed_session(session, call):
    session.prefill([[1, 2], [3]])
    session.close()
    with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
        call(session)
    assert len(session.engine.steps) == 1


@some_calls("decode", "append", "rewind", "reuse", "generate")
def test_lengths_that_were_changed_behind_the_session_are_refused(session, call):
    session.prefill([[1, 2, 3], [3]])
    session.cache.rewind(0, 2, stream=session.cache.memory.create_stream())
    with pytest.raises(RangeError, match=r"^cache lengths: expected \(3, 1\), the tokens that this session has run, got \(2, 1\)"):
        call(session)
    assert (session.tokens(0), session.cache.host_kv_cache_lengths) == ((1, 2, 3), (2, 1))
    assert np.isfinite(session.prefill([[1, 2]])).all()


@some_calls("decode", "append", "rewind", "prefill", "new")
@pytest.mark.parametrize("read", [1, 2])
def test_generate_is_over_once_another_call_has_changed_the_sequences(session, call, read):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    list(itertools.islice(events, read))
    call(session)
    text = refuse(session, ClosedError, lambda: next(events))
    assert text == "this iterator is over: another call has changed the sequences since. Call generate again."


# --- random programs beside lists of tokens ---


class Oracle:
    """What the slots should hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cached: list[list[int]] = []
        self.pending: list[list[int]] = []

    def check(self, session: InferenceSession) -> None:
        slots, lengths = range(session.cache.active_batch_size), list(map(len, self.cached))
        assert [list(session.tokens(slot)) for slot in slots] == self.cached
        assert [list(session.pending_tokens(slot)) for slot in slots] == self.pending
        assert list(session.cache.host_kv_cache_lengths) == session.cache.kv_cache_lengths.numpy().tolist() == lengths

    def attempt(self, call: Callable[[], Any], rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> Any:
        """Call what adds these rows to what was before; return None where it must be refused."""
        try:
            return call()
        except CapacityError:
            assert any(len(old) + len(row) > self.limit for old, row in zip(before, rows, strict=True))
        except LayoutError:
            assert self.limit == 7
            assert any(len(old) == 7 for old in self.cached)


TOKENS = st.integers(0, 30)


@given(data=st.data())
@pytest.mark.parametrize(("slots", "limit"), [(3, 16), (4, 7), (9, 7)], ids=["aligned", "not aligned", "every eighth"])
def test_random_programs(slots, limit, data):
    session, oracle = make(slots=slots, limit=limit), Oracle(limit)
    rows = st.lists(st.lists(TOKENS, min_size=1, max_size=limit), min_size=1, max_size=slots)
    for _ in range(data.draw(st.integers(1, 8))):
        poison(session.cache)
        data.draw(st.sampled_from([_append, _decode, _generate, _prefill, _rewind]))(session, oracle, data, rows)
        oracle.check(session)
    session.close()
    assert session.cache.memory.live_nbytes == 0


def _prefill(session, oracle, data, rows):
    prompts = data.draw(rows)
    reuse = len(prompts) == len(oracle.cached) and data.draw(st.booleans())
    if reuse:  # begin some as the slots do
        prompts = [
            (old + row)[: oracle.limit] if data.draw(st.booleans()) else row for old, row in zip(oracle.cached, prompts, strict=True)
        ]
    same(session.prefill(prompts, reuse=reuse), *prompts)
    oracle.cached, oracle.pending = [list(row) for row in prompts], [[] for _ in prompts]


def _append(session, oracle, data, rows):
    turns = [data.draw(st.lists(TOKENS, max_size=4)) for _ in oracle.cached]
    wanted = [pending + turn if turn else [] for pending, turn in zip(oracle.pending, turns, strict=True)]
    logits = oracle.attempt(lambda: session.append(turns), wanted, oracle.cached)
    for slot, row in enumerate(wanted if logits is not None else []):
        oracle.cached[slot] += row
        oracle.pending[slot] = [] if row else oracle.pending[slot]
        np.testing.assert_array_equal(logits[slot], logits_after(oracle.cached[slot]) if row else np.full(VOCAB, np.nan, np.float32))


def _decode(session, oracle, data, rows):
    tokens = [[data.draw(TOKENS)] for _ in oracle.cached]
    logits = oracle.attempt(lambda: session.decode([token for (token,) in tokens]), tokens, oracle.cached) if tokens else None
    if logits is not None:
        oracle.cached = [old + token for old, token in zip(oracle.cached, tokens, strict=True)]
        oracle.pending = [[] for _ in tokens]
        same(logits, *oracle.cached)


def _rewind(session, oracle, data, rows):
    if oracle.cached:
        slot = data.draw(st.integers(0, len(oracle.cached) - 1))
        length = data.draw(st.integers(0, len(oracle.cached[slot])))
        session.rewind(slot, length)
        del oracle.cached[slot][length:]
        oracle.pending[slot] = []


def _generate(session, oracle, data, rows):
    append = bool(oracle.cached) and data.draw(st.booleans())
    prompts = [data.draw(st.lists(TOKENS, min_size=1, max_size=3)) for _ in oracle.cached] if append else data.draw(rows)
    params = at_most(*(data.draw(st.integers(1, 5)) for _ in prompts))
    before = [c + p for c, p in zip(oracle.cached, oracle.pending, strict=True)] if append else [[] for _ in prompts]
    events = oracle.attempt(lambda: session.generate(prompts, params, append=append), prompts, before)
    first = oracle.attempt(lambda: next(events), prompts, before) if events else None
    if first is None:
        return
    found = by_prompt([first, *itertools.islice(events, data.draw(st.integers(0, 12)))])
    events.close()
    for slot, (old, prompt) in enumerate(zip(before, prompts, strict=True)):
        whole = [*old, *prompt]
        tokens, _, reason = found[slot] if slot < len(found) else ([], "", None)
        assert tokens == continuation(whole, len(tokens))
        room = oracle.limit - len(whole) + 1
        assert reason == ("length" if tokens and len(tokens) == min(room, params[slot].max_new_tokens) else None)
        assert held(session, slot) == [*whole, *tokens]
        assert len(session.pending_tokens(slot)) <= 2
    oracle.cached = [list(session.tokens(slot)) for slot in range(len(prompts))]
    oracle.pending = [list(session.pending_tokens(slot)) for slot in range(len(prompts))]
