"""``InferenceSession`` against lists of tokens: what it holds, what it answers, what it refuses.

The engine is the exact one of ``fakes``: its logits are a function of all tokens that it finds in a slot.
"""

import itertools

import numpy as np
import pytest
from cache_cases import linear_config
from checkpoint.tokenizer_folders import BOS
from fakes import VOCAB, Journal, RecordingEngine, RecordingMemory, cache_rows, kv_config, logits_after, poison, recorded
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import InferenceSession, KVLayout, LinearKVCache, SamplingParams, TensorNames
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, LayoutError, RangeError, ShapeError

S = 16


def make(*, slots=3, limit=S, combined=False, **options):
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    return InferenceSession(*recorded(kv_config(slots=slots, limit=limit, layout=layout), combined=combined), **options)


@pytest.fixture
def session():
    with make() as session:
        yield session


def same(logits, *rows):
    """Check that logits are those after these rows, each alone."""
    np.testing.assert_array_equal(logits, [logits_after(row) for row in rows])


def continuation(prompt, count):
    """The greedy tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def at_most(*counts):
    return [SamplingParams(max_new_tokens=count) for count in counts]


def by_prompt(events):
    """Tokens, text and reason of each prompt."""
    result = {}
    for event in events:
        entry = result.setdefault(event.index, [[], "", None])
        assert entry[2] is None, "a token came after the last one"
        entry[0].append(event.token)
        entry[1] += event.text
        entry[2] = event.finish_reason
    return [tuple(result[index]) for index in sorted(result)]


def refuse(session, kind, call):
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


def test_logits_are_float32_those_of_each_row_alone_and_the_callers(session):
    first, second = session.prefill([np.array([1, 2, 3, 4, 5, 6]), (7,), [8, 9]]), session.decode(np.array([10, 11, 12]))
    session.decode([5, 6, 7])
    session.prefill(np.array([[7], [8]]))
    assert (first.dtype, second.dtype) == (np.float32, np.float32)
    same(first, [1, 2, 3, 4, 5, 6], [7], [8, 9])
    same(second, [1, 2, 3, 4, 5, 6, 10], [7, 11], [8, 9, 12])
    assert (session.tokens(0), session.cache.active_batch_size, session.vocab_size, session.max_sequence_length) == ((7,), 2, VOCAB, S)
    assert type(session.tokens(0)[0]) is int


STEP_NAMES = {"input_ids": "tokens", "kvcache_start_index": "past", "last_token_ids": "which", "logits": "scores"}
CACHE_NAMES = {"k_cache": "k{i}", "v_cache": "v{i}", "present_k_cache": "k{i}_out", "present_v_cache": "v{i}_out"}


@pytest.mark.parametrize(
    ("cache", "engine", "tolerance"),
    [
        ({}, {"index_dtype": "int64"}, 0),
        ({}, {"logits_dtype": "bfloat16"}, 2**-7),
        ({"dtype": "bfloat16"}, {}, 0),
        ({}, {"names": TensorNames(**STEP_NAMES, **CACHE_NAMES)}, 0),
        ({}, {}, 0),
    ],
    ids=["int64", "bfloat16 logits", "bfloat16", "names", "linear"],
)
def test_engines_and_caches(cache, engine, tolerance):
    parts = recorded(kv_config(**cache), **engine)
    if not cache and not engine:
        memory = RecordingMemory(Journal())
        linear = LinearKVCache(linear_config(num_mamba_layers=0, head_dim=8, dtype="float32"), memory=memory)
        parts = RecordingEngine(linear.kv_config, memory), linear
    session = InferenceSession(*parts, names=engine.get("names", TensorNames()))
    rows = [[1, 2, 3, 4, 5, 6], [7]][: session.cache.kv_config.max_batch_size]
    for logits in (session.prefill(rows), session.decode([8, 9][: len(rows)])):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, [logits_after(row) for row in rows], rtol=tolerance)
        rows = [[*row, token] for row, token in zip(rows, (8, 9), strict=False)]


def test_reuse_runs_what_is_new_and_at_least_one_token(session):
    for before, prompts, start in (
        ([[1, 2, 3, 4, 7], [5, 6, 8]], [[1, 2, 3, 9, 9], [5, 6, 8, 1]], [3, 3]),
        ([[1, 2, 3, 4]], [[1, 2, 3]], [2]),
    ):
        session.prefill(before)
        reused = session.statistics.reused_tokens
        same(session.prefill(prompts, reuse=True), *prompts)
        assert (session.engine.steps[-1].start, session.statistics.reused_tokens - reused) == (start, sum(start))


def test_tokens_come_as_they_are_made(session):
    events = session.generate([[1, 2, 3], [6]], max_new_tokens=3)
    assert session.engine.steps == []
    seen = [next(events), next(events)]
    assert len(session.engine.steps) == 1
    assert [event.index for event in (*seen, *events)] == [0, 1, 0, 1, 0, 1]


def test_what_the_session_says_where_the_caller_does_not():
    session = make(eos_token_ids=[continuation([1, 2], 3)[-1]], defaults=SamplingParams(max_new_tokens=7))
    assert by_prompt(session.generate([1, 2]))[0][2] == "stop"
    assert len(list(session.generate([1, 2], ignore_eos=True))) == 7


def test_it_is_over_once_the_session_is_closed(session):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    next(events)
    session.close()
    with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
        next(events)


def test_a_request_does_not_depend_on_its_neighbours_or_its_slot(session):
    mine, prompts = SamplingParams(temperature=3.0, top_k=50, top_p=0.95, seed=5, max_new_tokens=8), [[1, 2, 3], [4], [5, 6]]
    for place, prompt in enumerate(prompts):
        params = [SamplingParams(temperature=9.0, seed=seed, max_new_tokens=seed) for seed in (3, 6)]
        params.insert(place, mine)
        assert by_prompt(session.generate(prompts, params))[place] == by_prompt(make(slots=1).generate(prompt, mine))[0]
    found = by_prompt(session.generate([[1, 2]] * 3, temperature=9.0, max_new_tokens=8))
    assert len({tuple(tokens) for tokens, _, _ in found}) == 3


def test_texts(tokenizer):
    ids, more = tokenizer.encode("see"), tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == BOS
    with make(slots=2, limit=32, tokenizer=tokenizer) as session:
        assert by_prompt(session.generate("see", max_new_tokens=3))[0][0] == continuation(ids, 3)
        same(session.prefill(["see", [1]]), ids, [1])
        same(session.append([" the", []])[:1], [*ids, *more])
        session.prefill(["see"])
        assert by_prompt(session.generate(" the", append=True, max_new_tokens=2))[0][0] == continuation([*ids, *more], 2)
        plain = by_prompt(session.generate(["see", "the"], max_new_tokens=12))
        stop = plain[0][1][3:6]
        assert stop not in plain[1][1]
        found = by_prompt(session.generate(["see", "the"], max_new_tokens=12, stop=[stop]))
        assert (found[0][1:], found[1]) == ((plain[0][1][: plain[0][1].index(stop)], "stop"), plain[1])


def test_statistics(session):
    assert session.statistics.prefill_tokens_per_second == session.statistics.decode_tokens_per_second == 0
    assert session.statistics.cache_bytes_reserved == session.cache.nbytes
    session.prefill([[1, 2, 3, 4, 5, 6], [7]])
    session.decode([1, 2])
    session.decode([1, 2])
    now = session.statistics
    assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 2, 4)
    assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (8 + 3)  # K and V of 1 + 2 heads of 16 float32, for 8 + 3 tokens
    assert 0 < now.prefill_seconds < 60 > now.decode_seconds > 0
    assert (now.prefill_tokens_per_second, now.decode_tokens_per_second) == (7 / now.prefill_seconds, 4 / now.decode_seconds)
    list(session.generate([[1, 2], [3]], at_most(1, 4)))  # one rides along, uncounted
    session.close()
    now = session.statistics
    assert (now.decode_steps, now.decode_tokens, now.cache_bytes_live) == (2 + 3, 4 + 3, 0)


TOO_LONG = list(range(S + 1))
ONE_EACH = "expected one for each of 2 active slots, got 1."
TOO_MANY = "exceeds max_sequence_length=16. Nothing was changed."
NO_TOKENIZER = "stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids."
BOTH = "generate: expected append or reuse, got both. A next turn keeps what its slot holds."
#: The call on a session with two sequences of 4 and 2 tokens, and what it says.
REFUSALS = [
    (CapacityError, lambda s: s.append([[1], [1] * 15]), f"slot 1 holds 2 tokens; adding 15 {TOO_MANY}"),
    (ShapeError, lambda s: s.prefill([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ConfigError, lambda s: s.prefill(["text"]), "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
    (RangeError, lambda s: s.prefill([[-1]]), f"prompts[0][0]: expected an integer from 0 to {VOCAB - 1}, got -1."),
    (CapacityError, lambda s: s.prefill([[1], TOO_LONG]), f"prompt 1 has 17 tokens; that {TOO_MANY}"),
    (ShapeError, lambda s: s.decode([1]), f"tokens: {ONE_EACH}"),
    (RangeError, lambda s: s.decode([1, VOCAB]), f"tokens[1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
    (ConfigError, lambda s: s.generate([1], stop=["x"]), NO_TOKENIZER),
    (RangeError, lambda s: s.generate([[1]], append=True, reuse=True), BOTH),
]


@pytest.mark.parametrize(("kind", "call", "text"), REFUSALS)
def test_refusals(session, kind, call, text):
    session.prefill([[1, 2, 3, 4], [5, 6]])
    assert refuse(session, kind, lambda: call(session)) == text


def test_refusals_before_any_prefill(session):
    assert refuse(session, ShapeError, lambda: session.decode([])) == "tokens: there are no active slots. Call prefill first."


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


def test_a_closed_session():
    for call in CALLS.values():
        session = make()
        session.prefill([[1, 2], [3]])
        session.close()
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            call(session)


def test_lengths_that_were_changed_behind_the_session_are_refused(session):
    for name in ("decode", "append", "rewind", "reuse", "generate"):
        session.prefill([[1, 2, 3], [3]])
        session.cache.rewind(0, 2, stream=session.cache.memory.create_stream())
        with pytest.raises(RangeError, match=r"^cache lengths: expected \(3, 1\), the tokens that this session has run, got \(2, 1\)"):
            CALLS[name](session)


@pytest.mark.parametrize("name", ["decode", "append", "rewind", "prefill", "new"])
@pytest.mark.parametrize("read", [1, 2])
def test_generate_is_over_once_another_call_has_changed_the_sequences(session, name, read):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    list(itertools.islice(events, read))
    CALLS[name](session)
    text = refuse(session, ClosedError, lambda: next(events))
    assert text == "this iterator is over: another call has changed the sequences since. Call generate again."


# --- random programs beside lists of tokens ---


class Oracle:
    """What the slots should hold."""

    def __init__(self, limit):
        self.limit = limit
        self.cached = []
        self.pending = []

    def check(self, session):
        slots, lengths = range(session.cache.active_batch_size), list(map(len, self.cached))
        assert [list(session.tokens(slot)) for slot in slots] == self.cached
        assert [list(session.pending_tokens(slot)) for slot in slots] == self.pending
        assert list(session.cache.host_kv_cache_lengths) == session.cache.kv_cache_lengths.numpy().tolist() == lengths

    def attempt(self, call, rows, before):
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
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(("slots", "limit"), [(3, 16), (4, 7), (9, 7)])
def test_random_programs(slots, limit, combined, data):
    session, oracle = make(slots=slots, limit=limit, combined=combined), Oracle(limit)
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
        assert [*session.tokens(slot), *session.pending_tokens(slot)] == [*whole, *tokens]
        assert len(session.pending_tokens(slot)) <= 2
    oracle.cached = [list(session.tokens(slot)) for slot in range(len(prompts))]
    oracle.pending = [list(session.pending_tokens(slot)) for slot in range(len(prompts))]
