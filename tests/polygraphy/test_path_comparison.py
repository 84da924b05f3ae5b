from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.assertions import raises
from tests.paths import GOLDEN
from trt_kvcache import HybridCacheManager
from trt_kvcache.errors import CapacityError, ConfigError, RangeError, ShapeError
from trt_kvcache.polygraphy.comparison import Comparison, comparison_lines
from trt_kvcache.polygraphy.first_difference import Difference
from trt_kvcache.polygraphy.path_comparison import TOLERANCES, compare_paths
from trt_kvcache.polygraphy.runners import RecomputeRunner, SessionRunner
from trt_kvcache.session.session import InferenceSession
from trt_kvcache.session.session_source import SessionSource

MODEL = GOLDEN / "qwen3-sharded"  # 2 layers, 2 KV heads of 24, vocabulary of 79
SIZES: dict[str, Any] = {"max_batch_size": 3, "max_sequence_length": 16, "max_prefill_length": 8}
SOURCE = SessionSource(MODEL, engine="reference", dtype="float32", **SIZES)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
STEPS = 6

Opens = Callable[[], InferenceSession]


def _compare(*sources: Opens, **options: Any) -> Comparison:
    return compare_paths(
        [SessionRunner(source, name) for source, name in zip(sources, "abc", strict=False)], PROMPTS, steps=STEPS, **options
    )


def corrupting(step: int, change: Callable[[InferenceSession], object], source: SessionSource = SOURCE) -> Opens:
    """Return a source of sessions in which ``change`` is done right after the enqueue of one step (0 is the prefill)."""

    def opens() -> InferenceSession:
        session = source()
        enqueue, calls = session.engine.enqueue, 0

        def wrapped(stream: Any) -> None:
            nonlocal calls
            enqueue(stream)
            if calls == step:
                change(session)
            calls += 1

        session.engine.enqueue = wrapped  # type: ignore[method-assign]
        return session

    return opens


def cache_row(session: InferenceSession, layer: int, kind: str) -> np.ndarray[Any, Any]:
    """Return K or V of one layer, ``[B, H, S, D]``, over the cache's own bytes."""
    array: np.ndarray[Any, Any] = session.cache.memory.array(session.cache.get_separate_kv_cache(layer)["KV".index(kind)])  # type: ignore[attr-defined]
    return array


def logits_off(steps: Collection[int], change: Callable[[np.ndarray[Any, Any]], object]) -> Opens:
    """Return a source of sessions in which ``change`` is done to the logits of some decode steps."""

    def opens() -> InferenceSession:
        session = SOURCE()
        decode, calls = session.decode, 0

        def wrapped(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
            nonlocal calls
            calls += 1
            logits = decode(tokens)
            if calls in steps:
                change(logits)
            return logits

        session.decode = wrapped  # type: ignore[method-assign]
        return session

    return opens


def test_cached_decoding_agrees_with_recomputation(capfd: pytest.CaptureFixture[str]) -> None:
    paths = [SessionRunner(SOURCE, "cached"), RecomputeRunner(SOURCE, "recomputed")]
    comparison = compare_paths(paths, PROMPTS, steps=STEPS)
    (pair,) = comparison.pairs
    assert comparison.agrees
    assert pair.agrees
    assert (pair.first, pair.second, pair.dtype, pair.difference) == ("cached", "recomputed", "float32", None)
    assert 0 < pair.largest_logits_share < TOLERANCES["float32"]
    assert 0 < pair.largest_rows_share < TOLERANCES["float32"]
    assert (pair.equal_tokens, pair.tokens, pair.token_difference) == (21, 21, None)
    assert capfd.readouterr() == ("", "")


def test_the_first_path_chooses_the_tokens() -> None:
    comparison = _compare(SOURCE, SOURCE)
    with SOURCE() as session:
        logits, expected = session.prefill(PROMPTS), []
        for _ in range(STEPS):
            expected.append(logits.argmax(axis=1).tolist())
            logits = session.decode(expected[-1])
    assert comparison.continuations == tuple(zip(*expected, strict=True))
    assert comparison.prompt_lengths == (7, 5, 2)
    assert comparison.steps == STEPS
    assert [path.name for path in comparison.paths] == ["a", "b"]
    assert all(path.prefill_seconds > 0 and path.decode_seconds > 0 for path in comparison.paths)


@pytest.mark.parametrize(
    ("step", "layer", "kind", "place"),
    [
        (2, 1, "K", (1, 1, 3, 5)),  # a row of the prompt
        (3, 0, "V", (2, 0, 4, 23)),  # a row of the step itself
        (0, 1, "V", (0, 1, 6, 0)),  # the last row of the prefill
    ],
)
def test_one_wrong_element_of_the_cache_is_named(
    step: int, layer: int, kind: str, place: tuple[int, int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    def change(session: InferenceSession) -> None:
        cache_row(session, layer, kind)[place] += 0.75

    (pair,) = _compare(SOURCE, corrupting(step, change)).pairs
    found = pair.difference
    assert isinstance(found, Difference)
    assert (found.step, found.layer, found.kind, found.tensor) == (step, layer, kind, f"{kind.lower()}_cache_{layer}")
    assert (found.slot, found.head, found.position, found.element) == place
    assert found.values[1] - found.values[0] == pytest.approx(0.75, abs=1e-5)
    assert found.count == 1
    assert pair.largest_rows_share > 0.01
    assert not pair.agrees
    assert capfd.readouterr() == ("", "")


def test_a_later_difference_does_not_hide_the_first() -> None:
    def change(session: InferenceSession) -> None:
        cache_row(session, 0, "K")[2, 1, 1, 7] += 50

    (pair,) = _compare(SOURCE, corrupting(2, change)).pairs
    assert pair.difference is not None
    assert (pair.difference.step, pair.difference.slot, pair.difference.position) == (2, 2, 1)
    assert pair.largest_logits_share > 0.01  # the steps after it were compared too
    assert pair.tokens == 21


def test_a_dead_row_is_no_difference() -> None:
    def change(session: InferenceSession) -> None:
        lengths = np.add(session.cache.host_kv_cache_lengths, 1)  # this step's row is written and not committed yet
        for layer in range(2):
            for slot, length in enumerate(lengths):
                cache_row(session, layer, "V")[slot, :, length:] = np.nan

    assert _compare(SOURCE, corrupting(3, change)).agrees


@pytest.mark.parametrize(("kind", "place"), [("conv", (1, 5, 2)), ("recurrent", (0, 3, 1, 7))])
def test_one_wrong_element_of_a_state_is_named_with_its_layer(kind: str, place: tuple[int, ...]) -> None:
    source = SessionSource(GOLDEN / "bamba", engine="reference", dtype="float32", **SIZES)

    def change(session: InferenceSession) -> None:
        cache = session.cache
        assert isinstance(cache, HybridCacheManager)
        view = {"conv": cache.get_next_conv_state, "recurrent": cache.get_next_recurrent_state}[kind](2)
        cache.memory.array(view)[place] += 5  # type: ignore[attr-defined]

    (pair,) = _compare(source, corrupting(2, change, source)).pairs
    found = pair.difference
    assert found is not None
    assert (found.step, found.tensor, found.kind) == (2, f"{kind}_state_1", f"{kind} state")
    assert (found.layer, found.decoder_layer, found.mixer) == (1, 2, "mamba2")
    assert found.values[1] - found.values[0] == pytest.approx(5, rel=1e-5)
    assert found.count == 1
    assert pair.largest_states_share is not None
    assert pair.largest_states_share > 0.01


@pytest.mark.parametrize(("kind", "mixer"), [("conv", "mamba2"), ("V", "attention")])
def test_a_layer_with_attention_and_states_is_named_by_the_mixer_that_differs(kind: str, mixer: str) -> None:
    source = SessionSource(GOLDEN / "falcon_h1", engine="reference", dtype="float32", **SIZES)

    def change(session: InferenceSession) -> None:
        cache = session.cache
        assert isinstance(cache, HybridCacheManager)
        if kind == "conv":
            cache.memory.array(cache.get_next_conv_state(3))[0, 5, 2] += 5  # type: ignore[attr-defined]
        else:
            cache_row(session, 2, "V")[0, 1, 0, 7] += 5  # of the third layer of the cache, after attention and states of the first

    (pair,) = _compare(source, corrupting(2, change, source)).pairs
    assert pair.difference is not None
    assert (pair.difference.layer, pair.difference.decoder_layer, pair.difference.mixer) == (1, 1, mixer)


@pytest.mark.parametrize("model", ["bamba", "falcon_h1", "lfm2-bias", "mamba2"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_with_states_agrees_with_recomputation(model: str, dtype: str) -> None:
    source = SessionSource(GOLDEN / model, engine="reference", dtype=dtype, **SIZES)  # type: ignore[arg-type]
    (pair,) = compare_paths([SessionRunner(source, "cached"), RecomputeRunner(source, "recomputed")], PROMPTS, steps=STEPS).pairs
    assert pair.agrees, pair.difference
    assert pair.largest_states_share is not None
    assert 0 < pair.largest_states_share < TOLERANCES[dtype]
    assert (pair.largest_rows_share is None) == (model == "mamba2")  # no attention, no rows


def test_a_nan_is_named() -> None:
    def change(session: InferenceSession) -> None:
        cache_row(session, 1, "V")[0, 1, 2, 3] = np.nan

    (pair,) = _compare(corrupting(4, change), SOURCE).pairs
    assert pair.difference is not None
    assert (pair.difference.step, pair.difference.layer, pair.difference.kind) == (4, 1, "V")
    assert (pair.difference.slot, pair.difference.head, pair.difference.position, pair.difference.element) == (0, 1, 2, 3)
    assert np.isnan(pair.difference.values[0])
    assert np.isnan(pair.largest_rows_share)


def test_one_wrong_logit_is_named_and_so_is_the_token_it_changes() -> None:
    def change(logits: np.ndarray[Any, Any]) -> None:
        logits[1, 42] += 100

    (pair,) = _compare(SOURCE, logits_off({5}, change)).pairs
    found = pair.difference
    assert found is not None
    assert (found.step, found.tensor, found.layer, found.kind) == (5, "logits", None, "logits")
    assert (found.slot, found.head, found.position, found.element) == (1, None, None, 42)
    assert (pair.equal_tokens, pair.tokens) == (20, 21)
    assert pair.token_difference is not None
    assert (pair.token_difference.step, pair.token_difference.slot, pair.token_difference.tokens[1]) == (5, 1, 42)


def test_a_wrong_length_is_named_even_where_it_is_small_beside_the_others() -> None:
    def opens() -> InferenceSession:
        session = SOURCE()
        decode = session.decode

        def wrapped(tokens: Sequence[int]) -> np.ndarray[Any, Any]:
            logits = decode(tokens)
            if session.cache.host_kv_cache_lengths[0] == 11:
                session.rewind(0, 10)  # the longest: then the rows of the two have different shapes
            return logits

        session.decode = wrapped  # type: ignore[method-assign]
        return session

    (pair,) = _compare(SOURCE, opens, tolerances={"float32": 0.5}).pairs
    assert pair.difference is not None
    assert (pair.difference.kind, pair.difference.step, pair.difference.slot, pair.difference.values) == ("length", 4, 0, (11, 10))


def test_every_pair_is_compared() -> None:
    def change(session: InferenceSession) -> None:
        cache_row(session, 0, "V")[0, 0, 0, 0] += 1

    comparison = _compare(SOURCE, SOURCE, corrupting(1, change))
    assert [(pair.first, pair.second, pair.agrees) for pair in comparison.pairs] == [
        ("a", "b", True),
        ("a", "c", False),
        ("b", "c", False),
    ]
    assert not comparison.agrees


def test_of_two_dtypes_the_coarser_one_counts() -> None:
    half = SessionSource(MODEL, engine="reference", dtype="float16", **SIZES)
    (pair,) = _compare(SOURCE, half).pairs
    assert pair.agrees
    assert (pair.dtype, pair.tolerance) == ("float16", TOLERANCES["float16"])
    assert pair.largest_rows_share > TOLERANCES["float32"]


def test_without_live_rows_only_logits_are_compared() -> None:
    def change(session: InferenceSession) -> None:
        cache_row(session, 0, "V")[0, 0, 0, 0] += 0.5

    paths = [SessionRunner(SOURCE, "a"), SessionRunner(corrupting(1, change), "b", live_rows=False)]
    comparison = compare_paths(paths, PROMPTS, steps=STEPS)
    assert not comparison.live_rows
    assert comparison.pairs[0].difference is not None
    assert (comparison.pairs[0].difference.kind, comparison.pairs[0].difference.step) == ("logits", 2)


def test_on_step_is_called_after_each_step() -> None:
    seen: list[int] = []
    _compare(SOURCE, SOURCE, on_step=seen.append)
    assert seen == list(range(STEPS + 1))


def test_a_prefill_alone_can_be_compared() -> None:
    comparison = compare_paths([SessionRunner(SOURCE, "a"), SessionRunner(SOURCE, "b")], PROMPTS, steps=0)
    assert comparison.agrees
    assert comparison.continuations == ((), (), ())


def test_what_cannot_be_compared_is_refused() -> None:
    with raises(ConfigError, "paths", expected="at least two"):
        compare_paths([SessionRunner(SOURCE, "a")], PROMPTS, steps=1)
    with pytest.raises(ConfigError, match="with different names, got a, a"):
        compare_paths([SessionRunner(SOURCE, "a"), SessionRunner(SOURCE, "a")], PROMPTS, steps=1)
    with pytest.raises(RangeError, match="steps"):
        compare_paths([SessionRunner(SOURCE, "a"), SessionRunner(SOURCE, "b")], PROMPTS, steps=-1)
    with raises(ConfigError, "tolerances", expected="for float32", got="float16"):
        _compare(SOURCE, SOURCE, tolerances={"float16": 1.0})
    with SOURCE() as session, raises(ConfigError, "b", "separate session"):
        compare_paths([SessionRunner(session, "a"), SessionRunner(session, "b")], PROMPTS, steps=1)
    with raises(ShapeError, "b", expected="layers and vocabulary of a", got="another model's"):
        _compare(SOURCE, SessionSource(GOLDEN / "llama", engine="reference", dtype="float32", **SIZES))


def test_a_sequence_that_does_not_fit_is_refused_before_anything_is_run() -> None:
    enqueued: list[int] = []
    paths = [SessionRunner(corrupting(0, lambda session: enqueued.append(1)), name) for name in "ab"]
    with pytest.raises(CapacityError, match=r"a: a prompt of 7 tokens and 10 more exceed max_sequence_length=16\. Nothing was run"):
        compare_paths(paths, PROMPTS, steps=10)
    assert enqueued == []
    assert not any(path.is_active for path in paths)
    assert compare_paths(paths, PROMPTS, steps=9).agrees


def test_paths_are_closed_when_a_step_fails() -> None:
    def change(session: InferenceSession) -> None:
        raise KeyboardInterrupt

    paths = [SessionRunner(SOURCE, "a"), SessionRunner(corrupting(2, change), "b")]
    with pytest.raises(KeyboardInterrupt):
        compare_paths(paths, PROMPTS, steps=STEPS)
    assert not any(path.is_active for path in paths)


def test_lines_name_the_first_different_token() -> None:
    def change(logits: np.ndarray[Any, Any]) -> None:
        logits[1, 42] += 100

    comparison = _compare(SOURCE, logits_off({3, 5}, change))
    tokens = comparison.pairs[0].token_difference
    assert tokens is not None
    lines = comparison_lines(comparison)
    assert lines[1] == "  first at decode step 3 in the logits: slot 1, token 42 (`logits`)"
    assert lines[-1] == f"  greedy tokens: 19 of 21 equal; first different after decode step 3 in slot 1: {tokens.tokens[0]} and 42"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_native_and_plugin_agree(dtype: str) -> None:
    native, plugin = (
        SessionSource(MODEL, engine="reference", dtype=dtype, attention=attention, **SIZES) for attention in ("native", "plugin")
    )
    comparison = compare_paths([SessionRunner(native, "n"), SessionRunner(plugin, "p"), RecomputeRunner(plugin, "r")], PROMPTS, steps=STEPS)
    assert comparison.agrees
    assert [pair.equal_tokens for pair in comparison.pairs] == [21] * 3
