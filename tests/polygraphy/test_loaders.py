"""Polygraphy loaders and their functions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from polygraphy.backend.base import BaseLoader
from polygraphy.exception import PolygraphyException
from polygraphy.logger import G_LOGGER

import trt_kvcache.polygraphy as namespace
from tests.helpers.assertions import raises
from tests.paths import SHIPPED
from trt_kvcache.errors import ConfigError
from trt_kvcache.polygraphy.failures import as_polygraphy
from trt_kvcache.polygraphy.loaders import (
    EngineFolderFromModel,
    NetworkFromModel,
    SessionFromFolder,
    engine_folder_from_model,
    network_from_model,
    session_from_folder,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        yield


@pytest.mark.parametrize("loader", [SessionFromFolder, EngineFolderFromModel, NetworkFromModel])
def test_they_are_loaders_of_polygraphy(loader: type) -> None:
    assert issubclass(loader, BaseLoader)


def test_a_session_is_opened_at_each_call() -> None:
    load = SessionFromFolder(SHIPPED, engine="reference", max_sequence_length=16)
    with load() as first, load() as second:
        assert first is not second
        assert first.max_sequence_length == 16


def test_the_function_opens_it_at_once() -> None:
    with session_from_folder(SHIPPED, engine="reference") as session:
        assert session.vocab_size == 320


def test_errors_are_those_of_polygraphy(tmp_path: Path) -> None:
    for make in (lambda: session_from_folder(tmp_path / "none"), lambda: engine_folder_from_model(tmp_path / "none", tmp_path / "e")):
        with pytest.raises(PolygraphyException, match="got nothing there"):
            make()
    with raises(PolygraphyException, "engine", "one of"):
        session_from_folder(SHIPPED, engine="onnx")
    with pytest.raises(PolygraphyException, match="max_batch_size"):
        network_from_model(SHIPPED, max_batch_size=0, max_sequence_length=16, max_prefill_length=8)


def test_warnings_go_through_the_logger_and_other_errors_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with G_LOGGER.verbosity(G_LOGGER.WARNING), as_polygraphy():
        warnings.warn("odd model", UserWarning, stacklevel=1)
    assert "[W] odd model" in "".join(capsys.readouterr())
    with pytest.raises(ZeroDivisionError), as_polygraphy():
        _ = 1 / 0
    with pytest.raises(PolygraphyException, match=r"^wrong$"), as_polygraphy():
        raise ConfigError("wrong")


@pytest.mark.trt
def test_a_model_is_built_and_opened(tmp_path: Path) -> None:
    build = EngineFolderFromModel(lambda: SHIPPED, tmp_path / "engine", max_sequence_length=32, flavour="tensorrt_rtx")
    with session_from_folder(build(), engine="reference") as session:
        assert session.max_sequence_length == 32


def test_the_namespace_has_every_public_name() -> None:
    assert dir(namespace) == namespace.__all__
    for name in namespace.__all__:
        assert not isinstance(getattr(namespace, name), type(namespace)), f"{name} is no module"
    with pytest.raises(AttributeError, match="has no attribute 'Runner'"):
        namespace.Runner  # noqa: B018
