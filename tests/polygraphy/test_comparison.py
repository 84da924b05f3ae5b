"""The result of a comparison, and how it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trt_kvcache.polygraphy.comparison import Comparison, PairComparison, TokenDifference, comparison_lines, difference_lines
from trt_kvcache.polygraphy.first_difference import Difference

IN_THE_CACHE = Difference(
    step=2,
    tensor="k_cache_1",
    layer=1,
    kind="K",
    slot=3,
    head=0,
    position=5,
    element=7,
    values=(0.5, 20.5),
    allowed=0.001,
    count=1,
)
IN_A_STATE = replace(
    IN_THE_CACHE, tensor="recurrent_state_4", layer=4, kind="recurrent state", position=None, channel=6, decoder_layer=5, mixer="mamba2"
)
IN_THE_LOGITS = replace(IN_THE_CACHE, step=0, tensor="logits", layer=None, kind="logits", head=None, position=None, element=42, count=3)
IN_THE_LENGTHS = replace(IN_THE_LOGITS, tensor="kvcache_lengths", kind="length", element=None, values=(11, 10))
PAIR = PairComparison(
    first="a",
    second="b",
    dtype="float16",
    tolerance=0.05,
    difference=None,
    largest_logits_share=0.0123,
    largest_rows_share=0.004,
    equal_tokens=21,
    tokens=21,
    token_difference=None,
)


def comparison(*pairs: PairComparison, steps: int = 6, live_rows: bool = True) -> Comparison:
    return Comparison(paths=(), pairs=pairs, steps=steps, prompt_lengths=(3,), continuations=((1,) * steps,), live_rows=live_rows)


@pytest.mark.parametrize(
    ("difference", "place"),
    [
        (
            IN_THE_CACHE,
            "first at decode step 2 in the K rows of the cache: layer 1, K, slot 3, head 0, position 5, element 7 (`k_cache_1`)",
        ),
        (
            IN_A_STATE,
            "first at decode step 2 in the recurrent states: "
            "layer 5 (mamba2), recurrent state, slot 3, head 0, channel 6, element 7 (`recurrent_state_4`)",
        ),
        (
            replace(IN_A_STATE, tensor="conv_state_4", kind="conv state", head=None, decoder_layer=None, mixer=None),
            "first at decode step 2 in the conv states: "
            "layer 4 of those with states, conv state, slot 3, channel 6, element 7 (`conv_state_4`)",
        ),
        (IN_THE_LOGITS, "first at the prefill in the logits: slot 3, token 42 (`logits`)"),
        (IN_THE_LENGTHS, "first at the prefill in the cache length: slot 3 (`kvcache_lengths`)"),
    ],
    ids=["cache", "recurrent state", "conv state", "logits", "lengths"],
)
def test_the_place_of_a_difference(difference: Difference, place: str) -> None:
    assert difference_lines(difference, "a", "b")[0] == place


def test_the_values_of_a_difference() -> None:
    _, values = difference_lines(IN_THE_CACHE, "ours", "theirs")
    assert values == "ours has 0.5, theirs has 20.5: 20 apart, allowed 0.001 (1 value too far apart in this tensor)"


def test_several_values_are_counted() -> None:
    assert difference_lines(IN_THE_LOGITS, "a", "b")[1].endswith("(3 values too far apart in this tensor)")


def test_a_pair_without_a_difference_agrees() -> None:
    assert PAIR.agrees
    assert not replace(PAIR, difference=IN_THE_CACHE).agrees


def test_a_comparison_agrees_if_every_pair_does() -> None:
    assert comparison(PAIR, PAIR).agrees
    assert not comparison(PAIR, replace(PAIR, difference=IN_THE_CACHE)).agrees


def test_the_report_of_a_pair_that_agrees() -> None:
    assert comparison_lines(comparison(PAIR)) == [
        "a and b agree: logits and live cache rows of a prefill and 6 decode steps",
        "  largest difference of logits 0.012, of live rows 0.004, "
        "relative to the largest value of the slot and head (float16: at most 0.05)",
        "  greedy tokens: 21 of 21 equal",
    ]


def test_the_report_of_a_pair_that_differs() -> None:
    lines = comparison_lines(comparison(replace(PAIR, difference=IN_THE_CACHE)))
    assert lines[0] == "a and b DIFFER: logits and live cache rows of a prefill and 6 decode steps"
    assert lines[1:3] == [f"  {line}" for line in difference_lines(IN_THE_CACHE, "a", "b")]


def test_the_report_of_a_model_with_states() -> None:
    first, second, _ = comparison_lines(comparison(replace(PAIR, largest_states_share=0.02)))
    assert first == "a and b agree: logits, live cache rows and states of a prefill and 6 decode steps"
    assert second.startswith("  largest difference of logits 0.012, of live rows 0.004, of states 0.02, relative to ")


def test_the_report_of_a_model_of_states_alone() -> None:
    first, second, _ = comparison_lines(comparison(replace(PAIR, largest_rows_share=None, largest_states_share=0.02)))
    assert first == "a and b agree: logits and states of a prefill and 6 decode steps"
    assert second.startswith("  largest difference of logits 0.012, of states 0.02, relative to ")


def test_the_report_without_live_rows() -> None:
    first, second, _ = comparison_lines(comparison(replace(PAIR, largest_rows_share=None), steps=1, live_rows=False))
    assert first == "a and b agree: logits of a prefill and 1 decode step"
    assert second.startswith("  largest difference of logits 0.012, relative to ")


@pytest.mark.parametrize(("step", "after"), [(0, "the prefill"), (3, "decode step 3")])
def test_the_first_different_token_is_named(step: int, after: str) -> None:
    pair = replace(PAIR, equal_tokens=20, token_difference=TokenDifference(step=step, slot=1, tokens=(7, 42)))
    assert comparison_lines(comparison(pair))[-1] == f"  greedy tokens: 20 of 21 equal; first different after {after} in slot 1: 7 and 42"


def test_pairs_are_reported_one_after_another() -> None:
    lines = comparison_lines(comparison(PAIR, replace(PAIR, second="c")))
    assert [line for line in lines if not line.startswith(" ")] == [
        f"a and {name} agree: logits and live cache rows of a prefill and 6 decode steps" for name in "bc"
    ]
