"""The sampling options of a command line."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from trt_kvcache.cli.sampling_flags import SamplingFlags, note_unused, with_drawn_seed
from trt_kvcache.generation.sampling import SamplingParams


def options(**given: Any) -> dict[str, Any]:
    return SamplingFlags(**given).options()


def test_options_that_were_not_given_are_left_to_the_model() -> None:
    assert options() == {"max_new_tokens": 128}


def test_options_that_were_given_are_passed_on() -> None:
    given = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.125, "seed": 6, "ignore_eos": True}
    assert options(**given) == given


def test_penalties_and_biases_are_passed_on() -> None:
    given = {"repetition_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": -0.5}
    assert options(**given, logit_bias=["7=1.5", "9=-inf"]) == {
        "max_new_tokens": 128,
        **given,
        "logit_bias": {7: 1.5, 9: float("-inf")},
    }


@pytest.mark.parametrize(
    ("given", "default", "expected"),
    [
        ({"top_p": 0.5, "min_p": 0.1}, 0.0, "--top-p and --min-p: without effect at temperature 0"),
        ({"top_p": 0.5, "temperature": 0.0}, 1.0, "--top-p: without effect at temperature 0"),
        ({"top_p": 0.5, "temperature": 0.7}, 0.0, ""),
        ({"top_p": 0.5}, 1.0, ""),
        ({"repetition_penalty": 1.1, "seed": 3}, 0.0, ""),
    ],
    ids=str,
)
def test_options_without_effect_are_named(given: dict[str, Any], default: float, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    note_unused(options(**given), SamplingParams(temperature=default))
    found = " ".join(capsys.readouterr().err.split())
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_zero_is_not_the_same_as_not_given() -> None:
    given = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    assert options(**given) == {"max_new_tokens": 128, **given}


def test_stop_texts_become_a_tuple() -> None:
    assert options(stop=[".", "!"])["stop"] == (".", "!")
    assert "stop" not in options(stop=[])


@pytest.mark.parametrize(
    ("given", "hint", "message"),
    [
        ({"top_p": 2.0}, "--top-p", "expected 0 < top_p <= 1, got 2.0."),
        ({"min_p": 1.0}, "--min-p", "expected 0 <= min_p < 1, got 1.0."),
        ({"temperature": -1.0}, "--temperature", "expected a finite number, at least 0, got -1.0."),
        ({"repetition_penalty": 0.0}, "--repetition-penalty", "expected a finite number above 0, got 0.0."),
        ({"logit_bias": ["7"]}, "--logit-bias", "expected ID=BIAS such as 42=-1.5, got '7'."),
        ({"logit_bias": ["a=1"]}, "--logit-bias", "expected ID=BIAS such as 42=-1.5, got 'a=1'."),
        ({"stop": [""]}, "--stop", "expected texts that are not empty, got ''."),
    ],
)
def test_a_value_out_of_range_is_wrong_usage_of_its_option(given: dict[str, Any], hint: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        options(**given)
    assert (raised.value.param_hint, raised.value.message) == (hint, message)


def test_a_seed_is_drawn_only_where_tokens_are() -> None:
    assert with_drawn_seed(SamplingParams()).seed is None
    assert with_drawn_seed(SamplingParams(temperature=1.0, seed=5)).seed == 5
    first, second = (with_drawn_seed(SamplingParams(temperature=1.0)).seed for _ in range(2))
    assert first is not None
    assert first != second
