"""``InferenceSession`` against lists of tokens; logits are a function of all tokens that the engine of ``fakes`` finds in a slot."""

import itertools

import numpy as np
import pytest
from fakes import VOCAB, cache_rows, kv_config, logits_after, poison, recorded
from hypothesis import given
from hypothesis import strategies as st

from trt_kvcache import InferenceSession, SamplingParams
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, LayoutError, RangeError, ShapeError

S = 16


def make(*, slots=3, limit=S, **options):
    return InferenceSession(*recorded(kv_config(slots=slots, limit=limit)), **options)


@pytest.fixture
def session():
    with make() as session:
        yield session


def same(logits, *rows):
    np.testing.assert_array_equal(logits, [logits_after(row) for row in rows])


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def by_prompt(events):
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
        tokens = [(session.tokens(slot), session.pending_tokens(slot)) for slot in slots]
        return session.cache.host_kv_cache_lengths, tokens, cache_rows(session.cache), session.statistics, len(session.engine.steps)

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


def test_statistics(session):
    session.prefill([[1, 2, 3, 4, 5, 6], [7]])
    session.decode([1, 2])
    now = session.statistics
    assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 1, 2)
    assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (7 + 2)  # K and V of 1 + 2 heads of 16 float32
    assert (now.prefill_tokens_per_second, now.decode_tokens_per_second) == (7 / now.prefill_seconds, 2 / now.decode_seconds)


TOO_MANY = "exceeds max_sequence_length=16. Nothing was changed."
REFUSALS = [
    (CapacityError, lambda s: s.append([[1], [1] * 15]), f"slot 1 holds 2 tokens; adding 15 {TOO_MANY}"),
    (ShapeError, lambda s: s.prefill([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ConfigError, lambda s: s.prefill(["text"]), "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
    (CapacityError, lambda s: s.prefill([[1], [1] * 17]), f"prompt 1 has 17 tokens; that {TOO_MANY}"),
    (ShapeError, lambda s: s.decode([1]), "tokens: expected one for each of 2 active slots, got 1."),
    (RangeError, lambda s: s.decode([1, VOCAB]), f"tokens[1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
]


@pytest.mark.parametrize(("kind", "call", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_refusals(session, kind, call, text):
    session.prefill([[1, 2, 3, 4], [5, 6]])
    assert refuse(session, kind, lambda: call(session)) == text


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
    for call in (*CALLS.values(), next):
        session = make()
        session.prefill([[1, 2], [3]])
        events = session.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        session.close()
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            call(events if call is next else session)


def test_lengths_that_were_changed_behind_the_session_are_refused(session):
    for name in ("decode", "append", "rewind", "reuse", "generate"):
        session.prefill([[1, 2, 3], [3]])
        session.cache.rewind(0, 2, stream=session.cache.memory.create_stream())
        with pytest.raises(RangeError, match=r"^cache lengths: expected \(3, 1\), the tokens that this session has run, got \(2, 1\)"):
            CALLS[name](session)


@pytest.mark.parametrize("name", ["decode", "append", "rewind", "prefill", "new"])
def test_generate_is_over_once_another_call_has_changed_the_sequences(session, name):
    events = session.generate([[1, 2], [3]], max_new_tokens=3)
    next(events)
    CALLS[name](session)
    text = refuse(session, ClosedError, lambda: next(events))
    assert text == "this iterator is over: another call has changed the sequences since. Call generate again."


class Oracle:
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
        try:
            return call()
        except CapacityError:
            assert any(len(old) + len(row) > self.limit for old, row in zip(before, rows, strict=True))
        except LayoutError:
            assert self.limit == 7
            assert any(len(old) == 7 for old in self.cached)


TOKENS = st.integers(0, 30)


@given(data=st.data())
@pytest.mark.parametrize(("slots", "limit"), [(3, 16), (4, 7), (9, 7)])
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
    params = [SamplingParams(max_new_tokens=data.draw(st.integers(1, 5))) for _ in prompts]
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
