from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.checkpoint import GenerationDefaults
from trt_kvcache.errors import CheckpointError


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_every_field_is_read(tmp_path: Path) -> None:
    folder = write(
        tmp_path, eos_token_id=[7, 9], do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05, transformers_version="5.0.0"
    )
    assert GenerationDefaults.open(folder) == GenerationDefaults(
        eos_token_ids=(7, 9), do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05
    )


def test_without_a_file_the_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    assert GenerationDefaults.open(tmp_path) == GenerationDefaults(
        eos_token_ids=(), do_sample=False, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0
    )


def test_zero_means_off(tmp_path: Path) -> None:
    defaults = GenerationDefaults.open(write(tmp_path, temperature=0.0, top_k=0, min_p=0, eos_token_id=3))
    assert (defaults.temperature, defaults.top_k, defaults.min_p, defaults.eos_token_ids) == (0.0, 0, 0.0, (3,))


def test_a_top_k_of_minus_one_is_off_too(tmp_path: Path) -> None:
    assert GenerationDefaults.open(write(tmp_path, do_sample=True, top_k=-1)).top_k == 0


@pytest.mark.parametrize(("value", "texts"), [("END", ("END",)), (["a", "b"], ("a", "b")), ([], ()), (None, ())])
def test_stop_strings_are_read(tmp_path: Path, value: Any, texts: tuple[str, ...]) -> None:
    defaults = GenerationDefaults.open(write(tmp_path, stop_strings=value))
    assert (defaults.stop_strings, defaults.ignored) == (texts, ())


def test_the_repetition_penalty_is_read(tmp_path: Path) -> None:
    assert GenerationDefaults.open(write(tmp_path, repetition_penalty=1.05)).repetition_penalty == 1.05
    assert GenerationDefaults.open(write(tmp_path, repetition_penalty=None)).repetition_penalty == 1.0


def test_fields_that_are_not_supported_are_listed(tmp_path: Path) -> None:
    off = {"no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1, "suppress_tokens": [], "top_h": None}
    assert GenerationDefaults.open(write(tmp_path, do_sample=True, **off)).ignored == ()
    on = {"no_repeat_ngram_size": 3, "typical_p": 0.9, "forced_eos_token_id": 0, "suppress_tokens": [4]}
    names = ("no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id")
    assert GenerationDefaults.open(write(tmp_path, **on)).ignored == names  # greedy: typical_p plays no part
    assert GenerationDefaults.open(write(tmp_path, do_sample=True, **on)).ignored == (*names, "typical_p")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature: expected a finite number > 0, got -1"),
        ({"top_k": -3}, "top_k: expected a positive integer, got -3"),
        ({"top_p": 1.5}, r"top_p: expected a number in \(0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a finite number > 0, got 0"),
        ({"min_p": -0.5}, "min_p: expected a finite number > 0, got -0.5"),
        ({"min_p": 1}, r"min_p: expected a number in \[0, 1\), got 1"),
        ({"stop_strings": ["a", ""]}, r"stop_strings: expected a text or a list of texts that are not empty, got \['a', ''\]"),
        ({"stop_strings": 5}, "stop_strings: expected a text or a list of texts that are not empty, got 5"),
        ({"do_sample": 1}, "do_sample: expected true or false, got 1"),
        ({"eos_token_id": [1.5]}, r"eos_token_id: expected a token id or a list of token ids, got \[1.5\]"),
    ],
)
def test_values_out_of_range_are_refused_with_the_file(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"generation_config.json: {message}"):
        GenerationDefaults.open(write(tmp_path, **values))


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with raises(CheckpointError, "generation_config.json", "JSON"):
        GenerationDefaults.open(tmp_path)
