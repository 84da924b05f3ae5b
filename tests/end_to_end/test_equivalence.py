"""Cached decoding is full recomputation: real models in NumPy, for every way of cutting a sequence into enqueues.

Each model is a golden folder; the full pass is one prefill of the whole sequence into an empty cache that nothing else is in.
That it is the one of transformers: reference/test_golden.py.
"""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from tests.helpers.assertions import assert_close, assert_same_choice
from tests.helpers.recording import poison
from tests.paths import GOLDEN
from tests.sweeps import each_once, one_of_each_family
from trt_kvcache import InferenceSession, SamplingParams

FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))

S = 24
MOST_PARTS = 3


def open_model(name, *, slots=1, limit=S, width=5, attention="native"):
    sizes = {"max_batch_size": slots, "max_sequence_length": limit, "max_prefill_length": width}
    return InferenceSession.from_model(GOLDEN / name, engine="reference", dtype="float32", attention=attention, **sizes)


#: Opened once: what one test leaves in the cache is stale for the next.
opened = cache(open_model)


@cache
def tokens_of(name):
    """Return the golden sequence, S tokens."""
    return tuple(load_file(GOLDEN / name / "golden.safetensors")["input_ids"].tolist())


@cache
def full_pass(name, tokens):
    """Return the logits of one full pass, in one enqueue."""
    return opened(name, width=S).prefill([tokens])[0]


def check(name, tokens, logits):
    expected = full_pass(name, tuple(tokens))
    assert_close(logits, expected)
    assert_same_choice(logits, expected)


def splits(length):
    """Every way to write ``length`` as a sum, in order."""
    if not length:
        yield []
    for first in range(1, length + 1):
        yield from ([first, *rest] for rest in splits(length - first))


# An enqueue is given where it starts, and how many tokens it has. Three parts have all of these pairs; one token each has the most parts.
@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "mask", "plugin"]))
def test_every_split_of_a_short_sequence(name, attention):
    tokens = tokens_of(name)[:7]
    session = opened(name, attention=attention)
    for parts in splits(len(tokens)):
        if MOST_PARTS < len(parts) < len(tokens):
            continue
        done = 0
        for part in parts:
            piece = tokens[done : done + part]
            logits = session.prefill([piece]) if not done else session.decode(piece) if part == 1 else session.append([piece])
            done += part
            check(name, tokens[:done], logits[0])
    assert session.tokens(0) == tokens


@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "mask", "plugin"]))
@settings(max_examples=6)
@given(data=st.data())
def test_ragged_batches_over_poisoned_rows(name, attention, data):
    """Rows of different length, cut at random, on a cache whose dead rows hold what must not be read."""
    value = 1e30 if attention == "mask" else np.nan
    slots = 3
    session = opened(name, slots=slots, attention=attention)
    whole = tokens_of(name)
    rows = [whole[start:] for start in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=slots))]
    done = [0] * len(rows)
    for step in range(data.draw(st.integers(1, 6))):
        poison(session.cache, value)
        left = [len(row) - count for row, count in zip(rows, done, strict=True)]
        decodes = step > 0 and min(left) > 0 and data.draw(st.booleans())
        parts = [1 if decodes else data.draw(st.integers(int(not step), most)) for most in left]
        new = [row[count : count + part] for row, count, part in zip(rows, done, parts, strict=True)]
        logits = session.decode([token for (token,) in new]) if decodes else session.append(new) if step else session.prefill(new)
        done = [count + part for count, part in zip(done, parts, strict=True)]
        for row, count, part, found in zip(rows, done, parts, logits, strict=True):
            if part:
                check(name, row[:count], found)
    poison(session.cache, value)


@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "mask", "plugin"]))
def test_a_larger_cache_changes_nothing(name, attention):
    tokens = tokens_of(name)
    for limit in (S, 40, 64):
        session = opened(name, slots=2, limit=limit, attention=attention)
        poison(session.cache, 1e30)
        session.prefill([tokens[:9], tokens[:4]])
        poison(session.cache, 1e30)
        logits = session.append([tokens[9:20], tokens[4:7]])
        for found, length in zip(logits, (20, 7), strict=True):
            check(name, tokens[:length], found)


#: One prompt fills its slot after three tokens, one asks for two, and two for twelve.
LIMITS = (9, 2, 12, 12)


def batch_of(name):
    """Four prompts of one golden sequence, of which one nearly fills its slot."""
    whole = tokens_of(name)
    return [whole[: S - 2], whole[:5], whole[3:6], whole[7:15]]


def generated(session, prompts, params):
    """The tokens of each prompt and why it ended, with NaN in all dead rows before every step."""
    poison(session.cache)
    tokens, reasons = [[] for _ in prompts], [None for _ in prompts]
    for event in session.generate(prompts, params):
        tokens[event.index].append(event.token)
        reasons[event.index] = event.finish_reason
        poison(session.cache)
    return tokens, reasons


@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "plugin"]))
def test_one_is_full_one_has_ended_and_the_others_go_on(name, attention):
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in LIMITS]
    tokens, reasons = generated(opened(name, slots=4, attention=attention), batch_of(name), params)
    assert [len(found) for found in tokens] == [3, 2, 12, 12]
    assert reasons == ["length"] * 4
    for prompt, one, found in zip(batch_of(name), params, tokens, strict=True):
        assert found == [event.token for event in opened(name).generate([prompt], one)]


@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "plugin"]))
def test_the_next_turn_goes_on_from_what_each_slot_has_kept(name, attention):
    whole, session = tokens_of(name), opened(name, slots=4, attention=attention)
    generated(session, batch_of(name), [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in LIMITS])
    turn = [whole[:2], whole[2:5]]
    if session.cache.states is None:
        session.rewind(0, S - 6)
    else:
        assert not session.tokens(0)  # it was full: states cannot go back to make room for a row
        turn[0] = ()
    kept = [session.tokens(slot) + session.pending_tokens(slot) for slot in range(2)]
    logits = session.append([*turn, [], []])
    for slot in range(2):
        if turn[slot]:
            check(name, (*kept[slot], *turn[slot]), logits[slot])


@pytest.mark.parametrize("name", one_of_each_family(FAMILIES))
def test_sampled_tokens_do_not_depend_on_the_neighbours(name):
    _, *prompts = batch_of(name)
    params = [SamplingParams(temperature=1.5, top_p=0.9, seed=seed, max_new_tokens=8, ignore_eos=True) for seed in (1, 2, 3)]
    together, _ = generated(opened(name, slots=4), prompts, params)
    for prompt, one, found in zip(prompts, params, together, strict=True):
        assert found == [event.token for event in opened(name).generate([prompt], one)]


@pytest.mark.parametrize(("attention", "shows"), [("mask", True), ("native", False)])
def test_the_mask_variant_reads_dead_rows_and_the_native_one_does_not(attention, shows):
    """The poison of these tests works: the mask gives dead rows the weight 0, so that a NaN among them spreads."""
    session = open_model("llama", attention=attention)
    session.prefill([tokens_of("llama")[:5]])
    poison(session.cache)
    assert np.isnan(session.decode([1])).any() == shows
