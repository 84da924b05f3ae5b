"""``SessionSource``: a folder and options, opened at each call."""

from __future__ import annotations

import pytest

from tests.helpers.assertions import raises
from tests.helpers.engine_files import make_engine_folder
from tests.paths import ROOT
from trt_kvcache import InferenceSession
from trt_kvcache.errors import ConfigError
from trt_kvcache.session.session_source import SessionSource

MODEL = ROOT / "examples" / "tiny-llama"


def test_each_call_opens_a_session_of_its_own():
    source = SessionSource(MODEL, engine="reference", max_batch_size=2)
    with source() as one, source() as other:
        assert one.cache is not other.cache
        assert one.cache.max_batch_size == other.cache.max_batch_size == 2


def test_options_are_checked_when_it_is_made():
    with raises(ConfigError, "engine", "one of"):
        SessionSource(MODEL, engine="onnx")


def test_replace_keeps_the_other_options():
    source = SessionSource(MODEL, engine="reference", max_batch_size=2)
    assert source.replace(engine="tensorrt") == SessionSource(MODEL, engine="tensorrt", max_batch_size=2)
    assert source.replace("elsewhere") == SessionSource("elsewhere", engine="reference", max_batch_size=2)


def test_an_engine_folder_refuses_what_its_build_has_fixed(tmp_path):
    folder = make_engine_folder(MODEL, tmp_path / "engine").path
    message = rf"^max_batch_size, dtype: expected with a Hugging Face folder only; {folder} is an engine folder, built with its own\.$"
    with pytest.raises(ConfigError, match=message):
        SessionSource(folder, engine="reference", max_batch_size=2, dtype="float16")()
    with raises(ConfigError, "max_batch_size", expected="with a Hugging Face folder only"):
        InferenceSession.open(folder, engine="reference", max_batch_size=2)


def test_progress_is_passed_on():
    stages = []
    SessionSource(MODEL, engine="reference")(lambda stage, done: stages.append(stage)).close()
    assert set(stages) == {"load weights"}
