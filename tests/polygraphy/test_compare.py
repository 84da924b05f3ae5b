import numpy as np
import pytest

from tests.paths import GOLDEN
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, ShapeError
from trt_kvcache.polygraphy.compare import TOLERANCES, compare_paths
from trt_kvcache.polygraphy.comparison import comparison_lines
from trt_kvcache.polygraphy.runner import RecomputeRunner, SessionRunner
from trt_kvcache.session.session_source import SessionSource


def source(model="qwen3-sharded", dtype="float32", **options):  # 2 layers, 2 KV heads of 24, vocabulary of 79
    sizes = {"max_batch_size": 3, "max_sequence_length": 16, "max_prefill_length": 8}
    return SessionSource(GOLDEN / model, engine="reference", dtype=dtype, **sizes, **options)


SOURCE, PLUGIN = source(), source(attention="plugin")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
STEPS = 6


def runners(*sources):
    return list(map(SessionRunner, sources, "abc"))


def compare(*sources, steps=STEPS, **options):
    return compare_paths(runners(*sources), PROMPTS, steps=steps, **options)


def corrupting(step, change, source=SOURCE):
    # a source of sessions in which ``change`` is done right after the enqueue of one step (0 is the prefill)
    def opens():
        session = source()
        enqueue, calls = session.engine.enqueue, []

        def wrapped(stream):
            enqueue(stream)
            if len(calls) == step:
                change(session)
            calls.append(stream)

        session.engine.enqueue = wrapped
        return session

    return opens


def cache_row(session, layer, kind):
    return session.cache.memory.array(session.cache.get_separate_kv_cache(layer)["KV".index(kind)])


def element_off(step, layer, kind, place, amount, source=SOURCE):
    return corrupting(step, lambda session: np.add.at(cache_row(session, layer, kind), place, amount), source)


def after_decode(change):
    # a source of sessions in which ``change(session, step, logits)`` is called after each decode step
    def opens():
        session = SOURCE()
        decode, calls = session.decode, []

        def wrapped(tokens):
            logits = decode(tokens)
            calls.append(tokens)
            change(session, len(calls), logits)
            return logits

        session.decode = wrapped
        return session

    return opens


def logits_off(step):
    # a source of sessions in which token 42 of slot 1 wins in one decode step
    def change(session, now, logits):
        logits[1, 42] += 100 * (now == step)

    return after_decode(change)


def test_the_first_path_chooses_the_tokens_and_each_step_is_told():
    seen, expected = [], []
    comparison = compare(SOURCE, SOURCE, on_step=seen.append)
    with SOURCE() as session:
        logits = session.prefill(PROMPTS)
        for _ in range(STEPS):
            expected.append(logits.argmax(axis=1).tolist())
            logits = session.decode(expected[-1])
    assert comparison.continuations == tuple(zip(*expected, strict=True))
    assert (comparison.prompt_lengths, comparison.steps, seen) == ((7, 5, 2), STEPS, list(range(STEPS + 1)))
    assert [path.prefill_seconds > 0 < path.decode_seconds for path in comparison.paths] == [True] * 2
    assert compare(SOURCE, SOURCE, steps=0).continuations == ((), (), ())


def test_a_wrong_length_is_named_even_where_it_is_small_beside_the_others():
    def change(session, step, logits):
        if step == 4:
            session.rewind(0, 10)  # the longest: then the rows of the two have different shapes

    (pair,) = compare(SOURCE, after_decode(change), tolerances={"float32": 0.5}).pairs
    found = pair.difference
    assert (found.kind, found.step, found.slot, found.values) == ("length", 4, 0, (11, 10))


def test_of_two_dtypes_the_coarser_one_counts():
    (pair,) = compare(SOURCE, source(dtype="float16")).pairs
    assert pair.agrees
    assert (pair.dtype, pair.tolerance) == ("float16", TOLERANCES["float16"])
    assert pair.largest_rows_share > TOLERANCES["float32"]


def test_without_live_rows_only_logits_are_compared():
    wrong = SessionRunner(element_off(1, 0, "V", (0, 0, 0, 0), 0.5), "b", live_rows=False)
    comparison = compare_paths([SessionRunner(SOURCE, "a"), wrong], PROMPTS, steps=STEPS)
    assert not comparison.live_rows
    found = comparison.pairs[0].difference
    assert (found.kind, found.step) == ("logits", 2)


def test_paths_are_closed_when_a_step_fails():
    paths = runners(SOURCE, corrupting(2, lambda session: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        compare_paths(paths, PROMPTS, steps=STEPS)
    assert not any(path.is_active for path in paths)


def test_cached_decoding_agrees_with_recomputation(capfd):
    comparison = compare_paths([SessionRunner(SOURCE, "cached"), RecomputeRunner(SOURCE, "recomputed")], PROMPTS, steps=STEPS)
    (pair,) = comparison.pairs
    assert comparison.agrees
    assert (pair.first, pair.second, pair.dtype, pair.difference) == ("cached", "recomputed", "float32", None)
    assert 0 < pair.largest_logits_share < TOLERANCES["float32"]
    assert 0 < pair.largest_rows_share < TOLERANCES["float32"]
    assert (pair.equal_tokens, pair.tokens, pair.token_difference) == (21, 21, None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("other", [SOURCE, PLUGIN])
@pytest.mark.parametrize(
    ("step", "layer", "kind", "place", "amount"),
    [
        (2, 1, "K", (1, 1, 3, 5), 0.75),  # a row of the prompt
        (3, 0, "V", (2, 0, 4, 23), 0.75),  # a row of the step itself
        (4, 1, "V", (0, 1, 2, 3), np.nan),
    ],
)
def test_one_wrong_element_of_the_cache_is_named(other, step, layer, kind, place, amount):
    (pair,) = compare(SOURCE, element_off(step, layer, kind, place, amount, other)).pairs
    found = pair.difference
    assert (found.step, found.layer, found.kind, found.tensor) == (step, layer, kind, f"{kind.lower()}_cache_{layer}")
    assert (found.slot, found.head, found.position, found.element, found.count) == (*place, 1)
    assert found.values[1] - found.values[0] == pytest.approx(amount, abs=1e-5, nan_ok=True)
    assert not pair.agrees


def test_a_dead_row_is_no_difference():
    def change(session):
        lengths = np.add(session.cache.host_kv_cache_lengths, 1)  # this step's row is written and not committed yet
        for layer in range(2):
            for slot, length in enumerate(lengths):
                cache_row(session, layer, "V")[slot, :, length:] = np.nan

    assert compare(SOURCE, corrupting(3, change)).agrees


def test_one_wrong_logit_is_named_and_so_is_the_token_it_changes():
    (pair,) = compare(SOURCE, logits_off(5)).pairs
    found, token = pair.difference, pair.token_difference
    assert (found.step, found.tensor, found.layer, found.kind) == (5, "logits", None, "logits")
    assert (found.slot, found.element) == (1, 42)
    assert (pair.equal_tokens, pair.tokens) == (20, 21)
    assert (token.step, token.slot, token.tokens[1]) == (5, 1, 42)


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ([SOURCE], {}, ConfigError, "paths: expected at least two, with different names, got a"),
        ([SOURCE] * 2, {"steps": -1}, RangeError, "steps"),
        ([SOURCE] * 2, {"tolerances": {"float16": 1.0}}, ConfigError, "tolerances: expected one for float32, got float16"),
        ([SOURCE, source("llama")], {}, ShapeError, "b: expected the layers and vocabulary of a, got another model's"),
    ],
)
def test_what_cannot_be_compared_is_refused(sources, options, error, message):
    with pytest.raises(error, match=message):
        compare(*sources, **options)


def test_a_sequence_that_does_not_fit_is_refused_before_anything_is_run():
    enqueued = []
    paths = runners(*[corrupting(0, enqueued.append)] * 2)
    with pytest.raises(CapacityError, match=r"a: a prompt of 7 tokens and 10 more exceed max_sequence_length=16\. Nothing was run"):
        compare_paths(paths, PROMPTS, steps=10)
    assert enqueued == []
    assert not any(path.is_active for path in paths)
    assert compare_paths(paths, PROMPTS, steps=9).agrees


def test_every_pair_is_compared_and_said_in_words():
    comparison = compare(SOURCE, SOURCE, element_off(2, 1, "K", (1, 1, 3, 5), 20))
    assert [pair.agrees for pair in comparison.pairs] == [True, False, False]
    found = comparison.pairs[1].difference
    ours, theirs = found.values
    lines = comparison_lines(comparison)
    assert lines[:6] == [
        "a and b agree: logits and live cache rows of a prefill and 6 decode steps",
        "  largest difference of logits 0, of live rows 0, relative to the largest value of the slot and head (float32: at most 2e-05)",
        "  greedy tokens: 21 of 21 equal",
        "a and c DIFFER: logits and live cache rows of a prefill and 6 decode steps",
        "  first at decode step 2 in the K rows of the cache: layer 1, K, slot 1, head 1, position 3, element 5 (`k_cache_1`)",
        f"  a has {ours:.9g}, c has {theirs:.9g}: 20 apart, allowed {found.allowed:.3g} (1 value too far apart in this tensor)",
    ]
    assert lines[7].startswith("  greedy tokens: ")
