"""Prefills in buckets compute what prefills of exact widths do: real models of all families in NumPy, on poisoned caches."""

import numpy as np
import pytest

from tests.end_to_end.test_equivalence import FAMILIES, S, open_model, tokens_of
from tests.helpers.assertions import assert_close, assert_same_choice
from tests.helpers.recording import poison
from tests.sweeps import each_once, one_of_each_family
from trt_kvcache import SamplingParams

SLOTS, WIDTH = 3, 8
BUCKETS = {1, 2, 4, 8}


def pair(name, attention, widths):
    """Return a session with exact widths, and one in buckets that notes its widths; dead rows hold what must not be read."""
    exact, bucketed = (open_model(name, slots=SLOTS, width=WIDTH, attention=attention) for _ in range(2))
    bucketed.engine.width_buckets = sorted(BUCKETS)
    run = bucketed.engine.set_input_shape

    def note(tensor, shape):
        if tensor == "input_ids":
            widths.add(shape[1])
        run(tensor, shape)

    bucketed.engine.set_input_shape = note
    for session in (exact, bucketed):
        poison(session.cache, 1e30 if attention == "mask" else np.nan)
    return exact, bucketed


def agree(expected, found):
    for one, other in zip(expected, found, strict=True):
        assert_close(other, one)
        assert_same_choice(other, one)


@pytest.mark.parametrize(("name", "attention"), each_once(one_of_each_family(FAMILIES), ["native", "mask", "plugin"]))
def test_logits_and_tokens_are_those_of_exact_widths(name, attention):
    whole, widths = tokens_of(name), set()
    exact, bucketed = pair(name, attention, widths)
    with exact, bucketed:
        for step in (
            lambda session: session.prefill([whole[:13], whole[:3], whole[3:9]]),
            lambda session: session.append([whole[13:16], whole[3:10], whole[9:12]]),
            lambda session: session.decode([5, 6, 7]),
            lambda session: session.append([whole[: S - 17], whole[:1], whole[:5]]),  # up to S: no room for the padding of 8 rows
        ):
            agree(step(exact), step(bucketed))
        assert widths <= BUCKETS
        assert bucketed.tokens(0) == exact.tokens(0)
        prompts = [whole[:7], whole[2:5]]
        greedy = SamplingParams(max_new_tokens=5, temperature=0.0)
        events = [[(one.index, one.token) for one in session.generate(prompts, greedy)] for session in (exact, bucketed)]
        assert events[0] == events[1]


@pytest.mark.parametrize("name", one_of_each_family(FAMILIES))
def test_verifications_are_those_of_exact_widths(name):
    whole, widths = tokens_of(name), set()
    exact, bucketed = pair(name, "plugin", widths)
    with exact, bucketed:
        found = []
        for session in (exact, bucketed):
            session.prefill([whole[:6], whole[:2]])
            found.append(session.verify([whole[6:9], whole[2:7]]))
            session.accept([2, 5])
        agree(*(np.concatenate([one[0, :3], one[1]]) for one in found))
        agree(*(session.decode([1, 2]) for session in (exact, bucketed)))
        assert bucketed.tokens(1) == exact.tokens(1)
        assert widths <= (BUCKETS | {5} if bucketed.cache.states is not None else BUCKETS)
