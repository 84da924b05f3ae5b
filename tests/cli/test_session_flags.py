"""The options of a command line that say which session to open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.assertions import raises
from trt_kvcache.cli.session_flags import SessionFlags, open_session
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.session_source import SessionSource

from .conftest import SHIPPED


def source(folder: Path, *, slots: int = 1, **given: Any) -> SessionSource:
    return SessionFlags(**{"engine": "reference", **given}).source(folder, slots=slots, prompt_cache_bytes=5)


def test_options_are_passed_on() -> None:
    given = {"max_sequence_length": 99, "dtype": "float32", "attention": "mask", "flavour": "tensorrt_rtx", "cuda_graphs": False}
    given["per_layer_table"] = "host"
    found = source(SHIPPED, max_batch_size=3, **given)
    assert found == SessionSource(SHIPPED, engine="reference", max_batch_size=3, prompt_cache_bytes=5, **given)


def test_a_model_folder_gets_a_slot_for_each_prompt() -> None:
    assert source(SHIPPED, slots=4).options.max_batch_size == 4


def test_a_given_batch_size_is_kept() -> None:
    assert source(SHIPPED, slots=4, max_batch_size=2).options.max_batch_size == 2


def test_an_engine_folder_keeps_its_batch_size(engine: Path) -> None:
    assert source(engine, slots=4).options.max_batch_size is None


def test_a_session_is_opened_from_a_model_folder() -> None:
    with open_session(source(SHIPPED, max_sequence_length=16)) as session:
        assert session.max_sequence_length == 16


def test_options_that_an_engine_folder_fixes_are_refused(engine: Path) -> None:
    with raises(ConfigError, "dtype", expected="with a Hugging Face folder only"):
        open_session(source(engine, dtype="float16"))
