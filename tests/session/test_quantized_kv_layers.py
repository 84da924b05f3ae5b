"""Whole sessions over quantized K and V of layers with other heads, head dims and windows each, and of layers beside states."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.assertions import assert_close, assert_same_choice
from tests.helpers.mixed_layers import RandomCheckpoint, mixed_model
from tests.paths import GOLDEN
from tests.session.test_quantized_kv import poison_rows, stored
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager, ReferenceEngine
from trt_kvcache.engine.decoder_cache import decoder_cache_config
from trt_kvcache.engine.quantized_kv import QuantizedKV
from trt_kvcache.errors import ConfigError
from trt_kvcache.sequences.prompt_cache import PromptCache

MIXED = mixed_model(32, 16, 48, 64)

#: Four head dims, three numbers of K/V heads with windows, and shared K/V; windows of every other layer; shared K/V; four kinds of states.
MODELS = ["mixed", "gemma2-bias", "gemma4-shared", "granitemoehybrid-bias", "qwen3_next", "nemotron_h", "lfm2"]
STATES = MODELS[3:]

S, SLOTS = 26, 8
TOKENS = [5, 9, 33, 41, 7, 12, 30, 3, 28, 19, 24, 2, 31, 8, 14, 6, 27, 11, 4, 22]
RAGGED = [TOKENS[:9], TOKENS[4:5], TOKENS[2:14], TOKENS[7:9], TOKENS[1:8], TOKENS[10:], TOKENS[3:6], TOKENS[5:18]]

#: Sums in another order may move an element from one stored value to the next.
SAME = {"fp8": 0.06, "int8": 0.02}

#: Each model with one of both, the first with either.
CASES = [("mixed", "int8"), *((name, list(SAME)[index % 2]) for index, name in enumerate(MODELS))]
cases = pytest.mark.parametrize(("name", "kind"), CASES)
pytestmark = pytest.mark.parametrize("engine", ["reference", "torch"])


def open_mixed(engine, kind, *, slots, logits, prompt_cache):
    """A session of a model that no folder describes."""
    sizes = {"max_batch_size": slots, "max_sequence_length": S}
    config = decoder_cache_config(MIXED, **sizes, dtype="float32", attention="plugin", quantized=QuantizedKV(kind))
    if engine == "torch":
        from trt_kvcache.torch_engine import TorchEngine as Engine
    else:
        Engine = ReferenceEngine
    opening = getattr(Engine, "open", Engine)
    options = {"dtype": "float32", "max_prefill_length": 7, "max_logits_per_slot": logits, "attention": "plugin"}
    opened = opening(RandomCheckpoint(MIXED), kv=config, memory=HostMemory(), **options)
    kv = KVCacheManager(config, memory=opened.memory)
    return InferenceSession(opened, kv, prompt_cache=PromptCache(kv, max_bytes=prompt_cache))


@contextmanager
def opened(name, engine, kind, *, slots=SLOTS, logits=1, prompt_cache=0):
    if engine == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    if name == "mixed":
        session = open_mixed(engine, kind, slots=slots, logits=logits, prompt_cache=prompt_cache)
    else:
        sizes = {"max_batch_size": slots, "max_sequence_length": S, "max_prefill_length": 7, "max_logits_per_slot": logits}
        session = InferenceSession.from_model(
            GOLDEN / name, engine=engine, dtype="float32", kv_dtype=kind, prompt_cache_bytes=prompt_cache, **sizes
        )
    if not isinstance(session.cache.memory, HostMemory):
        pytest.skip("heads of these dims are not those of the kernels")
    with session:
        poison_rows(session.cache)
        yield session


def logits_of(name, engine, kind, tokens):
    """The logits of one slot that took all tokens at once."""
    with opened(name, engine, kind, slots=1) as session:
        return session.prefill([tokens])[0]


@cases
def test_eight_ragged_slots(name, engine, kind):
    """Prefill, decode, a next turn of some, and a step of all."""
    held = [list(prompt) for prompt in RAGGED]
    with opened(name, engine, kind) as session:
        session.prefill(held)
        session.decode(TOKENS[:SLOTS])
        turns = [TOKENS[:count] for count in (3, 0, 1, 8, 0, 2, 1, 0)]
        found = session.append(turns)
        last = session.decode(TOKENS[8:16])
    for slot, prompt in enumerate(held):
        prompt.append(TOKENS[slot])
        if turns[slot]:
            prompt += turns[slot]
            assert_close(found[slot], logits_of(name, engine, kind, prompt), SAME[kind])
        prompt.append(TOKENS[8 + slot])
        assert_close(last[slot], logits_of(name, engine, kind, prompt), SAME[kind])


def assert_greedy(name, engine, kind, prompt, tokens):
    """Each token is the likeliest after those before it, or as likely."""
    with opened(name, engine, kind, slots=1) as session:
        logits = session.prefill([prompt])
        for token in tokens:
            assert_same_choice(np.eye(logits.shape[1])[token], logits[0], SAME[kind])
            logits = session.decode([token])


@cases
def test_requests_that_come_and_go(name, engine, kind):
    """Twelve requests of other lengths in eight slots, which are compacted, and filled again; then eight that begin together."""
    prompts = [*RAGGED, *(prompt[:4] for prompt in RAGGED[::2])]
    counts = [1 + 5 * index % 7 for index in range(len(prompts))]
    with opened(name, engine, kind) as session:
        handles = [
            session.submit(prompt, max_new_tokens=count, temperature=0.0, ignore_eos=True)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        while any(not handle.finished for handle in handles):
            session.step()
            poison_rows(session.cache, first=session.cache.active_batch_size)
        together = [[] for _ in RAGGED]
        for event in session.generate(RAGGED, max_new_tokens=3, temperature=0.0, ignore_eos=True):
            together[event.index].append(event.token)
    assert [len(handle.tokens) for handle in handles] == counts
    for prompt, handle in zip(prompts, handles, strict=True):
        assert_greedy(name, engine, kind, prompt, handle.tokens)
    for prompt, found in zip(RAGGED[::3], together[::3], strict=True):
        assert_greedy(name, engine, kind, prompt, found)


@cases
def test_drafts_and_rewind(name, engine, kind):
    """States cannot be rewound to a token that has no state of its own; drafts that are not taken leave no trace."""
    with opened(name, engine, kind, slots=3, logits=4) as session:
        session.prefill([TOKENS[:9], TOKENS[2:6], TOKENS[7:15]])
        if name in STATES:
            with pytest.raises(ConfigError, match="recurrent states cannot go back"):
                session.rewind(0, 4)
        else:
            session.rewind(0, 4)
        drafts = [[7, 8, 9], [4], [3, 5]]
        before = [session.tokens(slot) for slot in range(3)]
        verified = session.verify(drafts)
        session.accept([2, 0, 1])
        last = session.decode([10, 11, 12])
    for slot, (held, draft, count) in enumerate(zip(before, drafts, (2, 0, 1), strict=True)):
        for place in range(len(draft)):
            assert_close(verified[slot][place], logits_of(name, engine, kind, [*held, *draft[: place + 1]]), SAME[kind])
        assert_close(last[slot], logits_of(name, engine, kind, [*held, *draft[:count], 10 + slot]), SAME[kind])


@cases
def test_the_prompt_cache(name, engine, kind):
    following = [*TOKENS[:12], 3, 4]
    with opened(name, engine, kind, slots=2, prompt_cache=1 << 20) as session:
        session.prefill([TOKENS[:12]])
        before = [stored(session.cache, 0, count) for count in range(12)]
        session.prefill([TOKENS[5:8], TOKENS[9:11]])
        poison_rows(session.cache)
        found = session.prefill([following])
        reused = session.statistics.reused_tokens
        assert reused > 0
        assert stored(session.cache, 0, min(reused, 11)) == before[min(reused, 11)]
    assert_close(found[0], logits_of(name, engine, kind, following), SAME[kind])


@pytest.mark.parametrize(("name", "kind"), CASES[2:])
def test_snapshots(name, engine, kind, tmp_path):
    with opened(name, engine, kind, slots=2) as session:
        session.prefill([TOKENS[:3], TOKENS[4:17]])
        session.save_snapshot(tmp_path / "saved", 1)
        before = stored(session.cache, 1, 12)
        expected = session.decode([1, 2])[1]
    with opened(name, engine, kind, slots=2) as other:
        other.load_snapshots([tmp_path / "saved"])
        poison_rows(other.cache, first=1)
        assert stored(other.cache, 0, 12) == before
        assert_close(other.decode([2])[0], expected, SAME[kind])
