"""``SessionOptions``: listed once, checked when made, and the same as the keyword arguments of a session."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields

import pytest
from numpydoc.docscrape import FunctionDoc

from trt_kvcache import InferenceSession, ReferenceEngine, SessionSource, load
from trt_kvcache.errors import ConfigError, RangeError
from trt_kvcache.session import session_options
from trt_kvcache.session.session_options import BUILD_OPTIONS, ModelOptions, OpenOptions, SessionOptions


def test_keyword_arguments_are_the_fields():
    known = {field.name for field in fields(SessionOptions)}
    assert set(ModelOptions.__annotations__) == known
    assert set(OpenOptions.__annotations__) == known - set(BUILD_OPTIONS)


def test_keyword_arguments_have_the_types_of_the_fields():
    hints = typing.get_type_hints(SessionOptions, vars(session_options))
    assert typing.get_type_hints(ModelOptions, vars(session_options)) == hints


@pytest.mark.parametrize("name", BUILD_OPTIONS)
def test_what_a_build_has_fixed_is_not_given_by_default(name):
    assert getattr(SessionOptions(), name) is None


def test_options_that_a_build_has_fixed_are_named():
    assert SessionOptions().given_build_options == ()
    assert SessionOptions(engine="reference", dtype="float16", max_batch_size=2).given_build_options == ("max_batch_size", "dtype")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"engine": "onnx"}, ConfigError, "engine: expected one of auto, numpy, tensorrt, torch, got 'onnx'."),
        ({"flavour": "x"}, ConfigError, "flavour: expected one of auto, tensorrt, tensorrt_rtx, got 'x'."),
        ({"device": -1}, RangeError, "device: expected at least 0, got -1."),
        ({"prompt_cache_bytes": -1}, RangeError, "prompt_cache_bytes: expected at least 0, got -1."),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size: expected at least 1, got 0."),
        ({"max_sequence_length": 2.5}, ConfigError, "max_sequence_length: expected an integer, got 2.5."),
        ({"max_prefill_length": True}, ConfigError, "max_prefill_length: expected an integer, got True."),
        ({"max_logits_per_slot": 0}, ConfigError, "max_logits_per_slot: expected at least 1, got 0."),
        ({"max_logits_per_slot": "every"}, ConfigError, "max_logits_per_slot: expected a number of new tokens or 'all', got 'every'."),
        ({"dtype": "int8"}, ConfigError, "dtype: expected one of "),
        ({"attention": "flash"}, ConfigError, "attention: expected one of auto, native, mask, plugin, got 'flash'."),
        ({"plugin_layers": "cut"}, ConfigError, "plugin_layers: expected one of one-plan, segments, got 'cut'."),
    ],
)
def test_what_is_refused(options, kind, text):
    with pytest.raises(kind) as error:
        SessionOptions(**options)
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    ("name", "meant"), [("max_batch", "max_batch_size"), ("max_model_len", "max_sequence_length"), ("torch_dtype", "dtype"), ("x", None)]
)
def test_an_option_that_does_not_exist_is_refused_with_the_one_meant(name, meant):
    source = SessionSource("nowhere", dtype="float32")
    for call in (load, InferenceSession.open, InferenceSession.from_model, SessionSource, lambda _, **options: source.replace(**options)):
        with pytest.raises(ConfigError, match=rf"session: unknown option {name}\. .*Expected engine, .*, kv_scales\.") as error:
            call("examples/tiny-llama", **{name: 2})
        assert (f"Did you mean {meant} instead of {name}?" in str(error.value)) == (meant is not None)


@pytest.mark.parametrize("short", ["fp16", "half"])
def test_short_names_of_dtypes(short):
    assert SessionOptions(dtype=short) == SessionOptions(dtype="float16")
    with load("examples/tiny-llama", engine="numpy", dtype=short) as session:
        assert session.cache_config.dtype == "float16"


def test_numpy_is_the_reference_engine():
    assert SessionOptions(engine="reference").engine == SessionOptions(engine="numpy").engine == "numpy"
    with load("examples/tiny-llama", engine="numpy") as session:
        assert isinstance(session.engine, ReferenceEngine)


def test_load_shows_every_option():
    parameters = inspect.signature(load).parameters
    entries = {entry.name for entry in FunctionDoc(load)["Parameters"]}
    for field in fields(SessionOptions):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert field.name in entries
    assert "options" not in parameters
