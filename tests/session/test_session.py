"""``InferenceSession`` against lists of tokens: what it holds, what it answers, what it refuses.

The engine is the exact one of ``fakes``: its logits are a function of all tokens that it finds in a slot.
"""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.tokenizer_folders import BOS
from tests.helpers.cache_cases import linear_config
from tests.helpers.fakes import VOCAB, Journal, RecordingEngine, RecordingMemory, cache_rows, kv_config, logits_after, poison, recorded
from trt_kvcache import InferenceSession as Session
from trt_kvcache import KVLayout, LinearKVCache, SamplingParams, TensorNames
from trt_kvcache.errors import CapacityError, ClosedError, ConfigError, LayoutError, RangeError, ShapeError

S = 16


def make(*, slots=3, limit=S, combined=False, **options):
    layout = KVLayout.COMBINED if combined else KVLayout.SEPARATE
    return Session(*recorded(kv_config(slots=slots, limit=limit, layout=layout), combined=combined), **options)


@pytest.fixture
def s():
    with make() as s:
        yield s


def same(logits, *rows):
    np.testing.assert_array_equal(logits, list(map(logits_after, rows)))


def continuation(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_after(tokens))))
    return tokens[len(prompt) :]


def at_most(*counts):
    return [SamplingParams(max_new_tokens=count) for count in counts]


def by_prompt(events):
    result = {}
    for event in events:
        entry = result.setdefault(event.index, [[], "", None])
        assert entry[2] is None, "a token came after the last one"
        entry[0].append(event.token)
        entry[1] += event.text
        entry[2] = event.finish_reason
    return [tuple(result[index]) for index in sorted(result)]


def refuse(s, kind, call):
    """Call what must fail; nothing is enqueued and nothing changes; return the text."""

    def observe():
        cache = s.cache
        tokens = [(s.tokens(slot), s.pending_tokens(slot)) for slot in range(cache.active_batch_size)]
        lengths = cache.host_kv_cache_lengths, cache.kv_cache_lengths.numpy().tolist()
        return lengths, tokens, cache_rows(cache), s.statistics, len(s.engine.steps)

    before = observe()
    with pytest.raises(kind) as error:
        call()
    assert observe() == before
    return str(error.value)


def test_logits_are_those_of_each_row_alone(s):
    first, second = s.prefill([np.array([1, 2, 3, 4, 5, 6]), (7,), [8, 9]]), s.decode(np.array([10, 11, 12]))
    s.decode([5, 6, 7])
    s.prefill(np.array([[7], [8]]))
    assert first.dtype == second.dtype == np.float32
    same(first, [1, 2, 3, 4, 5, 6], [7], [8, 9])
    same(second, [1, 2, 3, 4, 5, 6, 10], [7, 11], [8, 9, 12])
    assert (s.tokens(0), s.cache.active_batch_size, s.vocab_size, s.max_sequence_length) == ((7,), 2, VOCAB, S)
    assert type(s.tokens(0)[0]) is int


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
    s = Session(*parts, names=engine.get("names", TensorNames()))
    rows = [[1, 2, 3, 4, 5, 6], [7]][: s.cache.kv_config.max_batch_size]
    for logits in (s.prefill(rows), s.decode([8, 9][: len(rows)])):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, [logits_after(row) for row in rows], rtol=tolerance)
        rows = [[*row, token] for row, token in zip(rows, (8, 9), strict=False)]


def test_reuse_runs_what_is_new(s):
    for before, prompts, start in (
        ([[1, 2, 3, 4, 7], [5, 6, 8]], [[1, 2, 3, 9, 9], [5, 6, 8, 1]], [3, 3]),
        ([[1, 2, 3, 4]], [[1, 2, 3]], [2]),
    ):
        s.prefill(before)
        reused = s.statistics.reused_tokens
        same(s.prefill(prompts, reuse=True), *prompts)
        assert (s.engine.steps[-1].start, s.statistics.reused_tokens - reused) == (start, sum(start))


def test_tokens_come_as_they_are_made(s):
    events = s.generate([[1, 2, 3], [6]], max_new_tokens=3)
    assert s.engine.steps == []
    seen = [next(events), next(events)]
    assert len(s.engine.steps) == 1
    assert [event.index for event in (*seen, *events)] == [0, 1, 0, 1, 0, 1]


def test_defaults_of_the_session():
    s = make(eos_token_ids=[continuation([1, 2], 3)[-1]], defaults=SamplingParams(max_new_tokens=7))
    assert by_prompt(s.generate([1, 2]))[0][2] == "stop"
    assert len(list(s.generate([1, 2], ignore_eos=True))) == 7


def test_a_request_depends_on_no_neighbour(s):
    mine, prompts = SamplingParams(temperature=3.0, top_k=50, top_p=0.95, seed=5, max_new_tokens=8), [[1, 2, 3], [4], [5, 6]]
    for place, prompt in enumerate(prompts):
        params = [SamplingParams(temperature=9.0, seed=seed, max_new_tokens=seed) for seed in (3, 6)]
        params.insert(place, mine)
        assert by_prompt(s.generate(prompts, params))[place] == by_prompt(make(slots=1).generate(prompt, mine))[0]
    found = by_prompt(s.generate([[1, 2]] * 3, temperature=9.0, max_new_tokens=8))
    assert len({tuple(tokens) for tokens, _, _ in found}) == 3


def test_texts(tokenizer):
    ids, more = tokenizer.encode("see"), tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(ids[:1], skip_special_tokens=False) == BOS
    with make(slots=2, limit=32, tokenizer=tokenizer) as s:
        assert by_prompt(s.generate("see", max_new_tokens=3))[0][0] == continuation(ids, 3)
        same(s.prefill(["see", [1]]), ids, [1])
        same(s.append([" the", []])[:1], [*ids, *more])
        s.prefill(["see"])
        assert by_prompt(s.generate(" the", append=True, max_new_tokens=2))[0][0] == continuation([*ids, *more], 2)
        plain = by_prompt(s.generate(["see", "the"], max_new_tokens=12))
        stop = plain[0][1][3:6]
        assert stop not in plain[1][1]
        found = by_prompt(s.generate(["see", "the"], max_new_tokens=12, stop=[stop]))
        assert (found[0][1:], found[1]) == ((plain[0][1][: plain[0][1].index(stop)], "stop"), plain[1])


def test_statistics(s):
    assert s.statistics.prefill_tokens_per_second == s.statistics.decode_tokens_per_second == 0
    assert s.statistics.cache_bytes_reserved == s.cache.nbytes
    s.prefill([[1, 2, 3, 4, 5, 6], [7]])
    s.decode([1, 2])
    s.decode([1, 2])
    now = s.statistics
    assert (now.prefill_tokens, now.reused_tokens, now.decode_steps, now.decode_tokens) == (7, 0, 2, 4)
    assert now.cache_bytes_live == 2 * 3 * 16 * 4 * (8 + 3)  # K and V of 1 + 2 heads of 16 float32, for 8 + 3 tokens
    assert 0 < now.prefill_seconds < 60 > now.decode_seconds > 0
    assert (now.prefill_tokens_per_second, now.decode_tokens_per_second) == (7 / now.prefill_seconds, 4 / now.decode_seconds)
    list(s.generate([[1, 2], [3]], at_most(1, 4)))  # one rides along, uncounted
    s.close()
    now = s.statistics
    assert (now.decode_steps, now.decode_tokens, now.cache_bytes_live) == (2 + 3, 4 + 3, 0)


TOO_MANY = "exceeds max_sequence_length=16. Nothing was changed."
NO_TOKENIZER = "stop texts: expected a model folder with tokenizer.json, got none. Use stop_token_ids."
BOTH = "generate: expected append or reuse, got both. A next turn keeps what its slot holds."
#: The call on a session with two sequences of 4 and 2 tokens, and what it says.
REFUSALS = [
    (CapacityError, lambda s: s.append([[1], [1] * 15]), f"slot 1 holds 2 tokens; adding 15 {TOO_MANY}"),
    (ShapeError, lambda s: s.prefill([[1], []]), "prompts[1]: expected at least one token, got none."),
    (ConfigError, lambda s: s.prefill(["text"]), "prompts[0]: expected token ids, got text. The model folder has no tokenizer.json."),
    (RangeError, lambda s: s.prefill([[-1]]), f"prompts[0][0]: expected an integer from 0 to {VOCAB - 1}, got -1."),
    (CapacityError, lambda s: s.prefill([[1], [*range(S + 1)]]), f"prompt 1 has 17 tokens; that {TOO_MANY}"),
    (ShapeError, lambda s: s.decode([1]), "tokens: expected one for each of 2 active slots, got 1."),
    (RangeError, lambda s: s.decode([1, VOCAB]), f"tokens[1]: expected an integer from 0 to {VOCAB - 1}, got {VOCAB}."),
    (ConfigError, lambda s: s.generate([1], stop=["x"]), NO_TOKENIZER),
    (RangeError, lambda s: s.generate([[1]], append=True, reuse=True), BOTH),
]


@pytest.mark.parametrize(("kind", "call", "text"), REFUSALS)
def test_refusals(s, kind, call, text):
    s.prefill([[1, 2, 3, 4], [5, 6]])
    assert refuse(s, kind, lambda: call(s)) == text


def test_refusals_before_any_prefill(s):
    assert refuse(s, ShapeError, lambda: s.decode([])) == "tokens: there are no active slots. Call prefill first."


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
    for call in (*CALLS.values(), None):
        s = make()
        events = s.generate([[1, 2], [3]], max_new_tokens=3)
        next(events)
        s.close()
        with pytest.raises(ClosedError, match=r"^this InferenceSession is closed\.$"):
            call(s) if call else next(events)


def test_lengths_changed_by_others_are_refused(s):
    for name in ("decode", "append", "rewind", "reuse", "generate"):
        s.prefill([[1, 2, 3], [3]])
        s.cache.rewind(0, 2, stream=s.cache.memory.create_stream())
        with pytest.raises(RangeError, match=r"^cache lengths: expected \(3, 1\), the tokens that this session has run, got \(2, 1\)"):
            CALLS[name](s)


@pytest.mark.parametrize("name", ["decode", "append", "rewind", "prefill", "new"])
@pytest.mark.parametrize("read", [1, 2])
def test_generate_is_over_after_another_call(s, name, read):
    events = s.generate([[1, 2], [3]], max_new_tokens=3)
    list(islice(events, read))
    CALLS[name](s)
    text = refuse(s, ClosedError, lambda: next(events))
    assert text == "this iterator is over: another call has changed the sequences since. Call generate again."


class Oracle:
    def __init__(self, limit):
        self.limit = limit
        self.cached = []
        self.pending = []

    def check(self, s):
        slots, lengths = range(s.cache.active_batch_size), list(map(len, self.cached))
        assert [list(s.tokens(slot)) for slot in slots] == self.cached
        assert [list(s.pending_tokens(slot)) for slot in slots] == self.pending
        assert list(s.cache.host_kv_cache_lengths) == s.cache.kv_cache_lengths.numpy().tolist() == lengths

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
    draw = data.draw
    s, held = make(slots=slots, limit=limit, combined=combined), Oracle(limit)
    rows = st.lists(st.lists(TOKENS, min_size=1, max_size=limit), min_size=1, max_size=slots)
    for _ in range(draw(st.integers(1, 8))):
        poison(s.cache)
        draw(st.sampled_from([_append, _decode, _generate, _prefill, _rewind]))(s, held, draw, rows)
        held.check(s)
    s.close()
    assert s.cache.memory.live_nbytes == 0


def _prefill(s, held, draw, rows):
    prompts = draw(rows)
    reuse = len(prompts) == len(held.cached) and draw(st.booleans())
    if reuse:  # begin some as the slots do
        prompts = [(old + row)[: held.limit] if draw(st.booleans()) else row for old, row in zip(held.cached, prompts, strict=True)]
    same(s.prefill(prompts, reuse=reuse), *prompts)
    held.cached, held.pending = [list(row) for row in prompts], [[] for _ in prompts]


def _append(s, held, draw, rows):
    turns = [draw(st.lists(TOKENS, max_size=4)) for _ in held.cached]
    wanted = [pending + turn if turn else [] for pending, turn in zip(held.pending, turns, strict=True)]
    logits = held.attempt(lambda: s.append(turns), wanted, held.cached)
    for slot, row in enumerate(wanted if logits is not None else []):
        held.cached[slot] += row
        held.pending[slot] = [] if row else held.pending[slot]
        np.testing.assert_array_equal(logits[slot], logits_after(held.cached[slot]) if row else np.full(VOCAB, np.nan, np.float32))


def _decode(s, held, draw, rows):
    tokens = [[draw(TOKENS)] for _ in held.cached]
    logits = held.attempt(lambda: s.decode([token for (token,) in tokens]), tokens, held.cached) if tokens else None
    if logits is not None:
        held.cached = [old + token for old, token in zip(held.cached, tokens, strict=True)]
        held.pending = [[] for _ in tokens]
        same(logits, *held.cached)


def _rewind(s, held, draw, rows):
    if held.cached:
        slot = draw(st.integers(0, len(held.cached) - 1))
        length = draw(st.integers(0, len(held.cached[slot])))
        s.rewind(slot, length)
        del held.cached[slot][length:]
        held.pending[slot] = []


def _generate(s, held, draw, rows):
    append = bool(held.cached) and draw(st.booleans())
    prompts = [draw(st.lists(TOKENS, min_size=1, max_size=3)) for _ in held.cached] if append else draw(rows)
    params = at_most(*(draw(st.integers(1, 5)) for _ in prompts))
    before = [c + p for c, p in zip(held.cached, held.pending, strict=True)] if append else [[] for _ in prompts]
    events = held.attempt(lambda: s.generate(prompts, params, append=append), prompts, before)
    first = held.attempt(lambda: next(events), prompts, before) if events else None
    if first is None:
        return
    found = by_prompt([first, *islice(events, draw(st.integers(0, 12)))])
    events.close()
    for slot, (old, prompt) in enumerate(zip(before, prompts, strict=True)):
        whole = [*old, *prompt]
        tokens, _, reason = found[slot] if slot < len(found) else ([], "", None)
        assert tokens == continuation(whole, len(tokens))
        room = held.limit - len(whole) + 1
        assert reason == ("length" if tokens and len(tokens) == min(room, params[slot].max_new_tokens) else None)
        assert [*s.tokens(slot), *s.pending_tokens(slot)] == [*whole, *tokens]
        assert len(s.pending_tokens(slot)) <= 2
    held.cached = [list(s.tokens(slot)) for slot in range(len(prompts))]
    held.pending = [list(s.pending_tokens(slot)) for slot in range(len(prompts))]
